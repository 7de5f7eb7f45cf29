"""The main job of a deployment: checkpoint, weight on the device, calls, comparison; strict from the first import.

    python -S -E strict_job.py SITE MODEL DEVICE [stub] [sandboxed]

SITE is the only folder of packages. With "stub" the device is the stub's; with "sandboxed" the job first shows that
its surroundings are what they should be.
"""

import errno
import importlib.util
import os
import shutil
import socket
import sys

SITE, MODEL, DEVICE = sys.argv[1:4]
sys.path.insert(0, SITE)


def show_surroundings():
    """No compiler, no triton, no home, nowhere to write, nobody to talk to."""
    for program in ("cc", "gcc", "clang", "ld", "nvcc", "ptxas", "hipcc", "sh"):
        assert shutil.which(program) is None, program
    for package in ("triton", "torch", "ninja", "ziglang"):
        assert importlib.util.find_spec(package) is None, package
    for half in ("aot", "kernels", "csrc"):
        assert not os.path.exists(os.path.join(SITE, "gristmill", half)), half
    assert "HOME" not in os.environ
    assert os.getuid() != 0
    read_only = (errno.EROFS, errno.EACCES, errno.ENOENT)
    for folder in (SITE, os.getcwd(), "/", "/tmp", "/var/tmp", "/dev/shm", "/home", os.path.dirname(sys.executable)):
        path = os.path.join(folder, "written_by_gristmill")
        assert failure_of(os.open, path, os.O_WRONLY | os.O_CREAT) in read_only, folder
    for address in (("192.0.2.1", 80), ("127.0.0.1", 80)):
        assert failure_of(socket.create_connection, address, 2) == errno.ENETUNREACH, address


def failure_of(function, *arguments):
    """The code with which the system refuses a call; None if it does not."""
    try:
        function(*arguments)
    except OSError as error:
        return error.errno
    return None


def multiply_and_compare(np):
    """The API's way, with numbers that are checked here once more."""
    rng = np.random.default_rng(7)
    for dtype in ("float16", "bfloat16"):
        for zero_points in (False, True):
            q, scales = rng.integers(0, 16, (264, 512)), rng.uniform(0.01, 0.02, (264, 4))
            zeros = rng.integers(0, 16, (264, 4)) if zero_points else None
            host = gristmill.pack(q, scales, zeros, group_size=128, dtype=dtype)
            weight = gristmill.to_device(host, DEVICE)
            for M in (1, 17):
                x = rng.standard_normal((M, 512)).astype(host.scales.dtype)
                out = gristmill.linear(gristmill.DeviceArray.from_numpy(x, DEVICE), weight).to_numpy()
                dense = dequantize(host)
                bound = error_bound(x, dense, dtype=dtype, roundings=3, weights_in_dtype=True)
                worst = worst_error_over_bound(out, linear_float64(x, dense), bound)
                assert 0 < worst <= 1, (dtype, zero_points, M, worst)


if "sandboxed" in sys.argv:
    show_surroundings()
os.environ["GRISTMILL_STRICT"] = "process"
import gristmill  # noqa: E402
from gristmill import strict  # noqa: E402

assert strict.enabled()
import numpy  # noqa: E402
from gristmill.cli import main  # noqa: E402
from gristmill.packed_weight import dequantize  # noqa: E402
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound  # noqa: E402

if "stub" in sys.argv:
    import stub_compute

    stub_compute.attach()
multiply_and_compare(numpy)
print("multiplied and compared", flush=True)
if os.path.exists(MODEL):
    assert main(["check", MODEL, "--device", DEVICE, "--m", "1,5,33"]) == 0
    print("checked the model")
assert not strict.violations, strict.violations
