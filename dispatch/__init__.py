"""Gristmill: W4A16 GEMM kernels, ground ahead of time.

    import gristmill
    y = gristmill.linear(x, weight)

Names are loaded on first use: importing the package imports neither numpy nor torch nor a driver.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gristmill.arrays import Device, DeviceArray
    from gristmill.gemm import linear
    from gristmill.packed_weight import PackedWeight, pack
    from gristmill.placement import to_device
    from gristmill.preloading import preload, unload
    from gristmill.torch_adapter import to_torch

_HOMES = {
    "Device": "gristmill.arrays",
    "DeviceArray": "gristmill.arrays",
    "PackedWeight": "gristmill.packed_weight",
    "linear": "gristmill.gemm",
    "pack": "gristmill.packed_weight",
    "preload": "gristmill.preloading",
    "to_device": "gristmill.placement",
    "to_torch": "gristmill.torch_adapter",
    "unload": "gristmill.preloading",
}

# Modules that can be reached without importing them by name.
_MODULES = ("nn", "strict")

__all__ = ["Device", "DeviceArray", "PackedWeight", "linear", "pack", "preload", "to_device", "to_torch", "unload"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


if os.environ.get("GRISTMILL_STRICT"):  # what it may say is in gristmill.environment, which costs an import
    from gristmill.strict import enable_as_asked

    enable_as_asked()
