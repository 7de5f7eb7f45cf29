"""What pyproject.toml cannot say yet: the extension, which an install without a C compiler does without."""

import os

from setuptools import Extension, setup

# `gristmill wheel` makes one wheel with it, "required", and for every platform one without, "none".
extension = os.environ.get("GRISTMILL_EXTENSION", "optional")
fastcall = Extension(
    "gristmill._fastcall",
    sources=["csrc/host/fastcall.c"],
    extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=extension == "optional",
)

if extension == "none":
    setup()
else:
    setup(ext_modules=[fastcall], options={"bdist_wheel": {"py_limited_api": "cp310"}})
