"""What pyproject.toml cannot say yet: the extension, which a build without a C compiler does without."""

import os

from setuptools import Extension, setup

fastcall = Extension(
    "gristmill._fastcall",
    sources=["csrc/host/fastcall.c"],
    extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=True,
)

# `gristmill wheel` makes the wheel for every platform with it.
if os.environ.get("GRISTMILL_PURE_PYTHON"):
    setup()
else:
    setup(ext_modules=[fastcall], options={"bdist_wheel": {"py_limited_api": "cp310"}})
