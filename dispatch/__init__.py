"""Gristmill: W4A16 GEMM kernels, ground ahead of time.

    import gristmill
    y = gristmill.linear(x, weight)

Names are loaded on first use: importing the package imports neither numpy nor torch nor a driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gristmill.arrays import Device, DeviceArray
    from gristmill.gemm import linear
    from gristmill.packed_weight import PackedWeight, pack
    from gristmill.placement import to_device
    from gristmill.preloading import preload
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
}

__all__ = ["Device", "DeviceArray", "PackedWeight", "linear", "pack", "preload", "to_device", "to_torch"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
