"""What a process does that was started by spawn: it can import this module, and nothing of its parent's."""

import gristmill
import numpy as np
import stub_compute
from gristmill.packed_weight import PackedWeight


def multiply(host: PackedWeight, x: np.ndarray, device: str, on_stub: bool = False) -> np.ndarray:
    """x times a host weight, on `device`, which may be the stub's."""
    if on_stub:
        stub_compute.attach()
    weight = gristmill.to_device(host, device)
    return gristmill.linear(gristmill.DeviceArray.from_numpy(x, device), weight).to_numpy()
