"""What selection knows of a device, and which pack serves it."""

from __future__ import annotations

from gristmill.errors import NoDeviceError
from gristmill.named_tuple import NamedTuple


class DeviceFacts(NamedTuple):
    """The driver's own figures for one device; read once per device."""

    backend: str  # "cuda" or "hip"
    arch: str  # "sm90", "gfx1151"
    name: str
    warp_size: int
    multiprocessor_count: int
    lds_bytes_per_block: int  # the most that a block may have: the opt-in limit on NVIDIA
    max_threads_per_block: int

    def formula_values(self) -> dict[str, int]:
        """Its share of the values that a manifest's formulas may name."""
        return {"lds_bytes": self.lds_bytes_per_block, "multiprocessor_count": self.multiprocessor_count}


# Which packs serve which device, best first. A table, never arithmetic on a name: sm80's cubins run on 8.6, 8.7 and
# 8.9 (same major, newer minor; shared memory is checked per entry), AMD's loader takes the exact target only.
PACKS_FOR_ARCH: dict[str, tuple[str, ...]] = {
    "gfx1151": ("gfx1151",),
    "gfx1201": ("gfx1201",),
    "sm80": ("sm80",),
    "sm86": ("sm80",),
    "sm87": ("sm80",),
    "sm89": ("sm80",),
    "sm90": ("sm90",),
}

# Facts for a device that is not there, for `why --arch` and `cover`: vendor figures for one common part of each arch.
# HIP counts a work-group processor (two compute units) as one multiprocessor.
NOMINAL_DEVICES: dict[str, DeviceFacts] = {
    facts.arch: facts
    for facts in (
        DeviceFacts("hip", "gfx1151", "Radeon 8060S (nominal)", 32, 20, 65536, 1024),
        DeviceFacts("hip", "gfx1201", "Radeon RX 9070 XT (nominal)", 32, 32, 65536, 1024),
        DeviceFacts("cuda", "sm80", "A100 (nominal)", 32, 108, 166912, 1024),
        DeviceFacts("cuda", "sm86", "RTX 3090 (nominal)", 32, 82, 101376, 1024),
        DeviceFacts("cuda", "sm87", "Jetson AGX Orin (nominal)", 32, 16, 166912, 1024),
        DeviceFacts("cuda", "sm89", "RTX 4090 (nominal)", 32, 128, 101376, 1024),
        DeviceFacts("cuda", "sm90", "H200 (nominal)", 32, 132, 232448, 1024),
    )
}


def nominal_device(arch: str) -> DeviceFacts:
    """Facts of a typical device of `arch`; NoDeviceError when the arch is unknown."""
    if arch not in NOMINAL_DEVICES:
        raise NoDeviceError(f"unknown arch {arch!r}; known: {', '.join(NOMINAL_DEVICES)}")
    return NOMINAL_DEVICES[arch]
