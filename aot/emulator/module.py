"""Loading a code object: its segments as one image, and its kernels with the code they compile to."""

from __future__ import annotations

import numpy as np

from ..amdgpu_code_object import CodeObject, KernelInfo
from .decode import generation
from .errors import LaunchError
from .program import Program
from .waves import LANES


class Module:
    """A loaded code object."""

    def __init__(self, code_object: bytes):
        self.code_object = CodeObject.parse(code_object)
        self.arch = self.code_object.arch
        generation(self.arch)  # refuses what is not RDNA3 or RDNA4
        self.image = _image(self.code_object)
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, symbol: str) -> Kernel:
        """The kernel of that name; CodeObjectError lists those there are."""
        if symbol not in self._kernels:
            self._kernels[symbol] = Kernel(self, self.code_object.kernel(symbol))
        return self._kernels[symbol]


class Kernel:
    """A kernel and its compiled code, which launches share."""

    def __init__(self, module: Module, info: KernelInfo):
        self.module, self.info = module, info
        if info.wavefront_size != LANES or not info.descriptor.wave32:
            raise LaunchError(f"{info.name}: built for waves of {info.wavefront_size}; only wave32 is emulated")
        co = module.code_object
        self.program = Program(
            module.arch, co.text, co.text_address, info.entry_address, info.code_bytes, info.descriptor.vgprs
        )

    @property
    def name(self) -> str:
        return self.info.name


def _image(code_object: CodeObject) -> np.ndarray:
    """The loaded segments as one piece of memory from address 0 of the file."""
    size = max(s.address + s.memory_bytes for s in code_object.segments)
    image = np.zeros(-(-size // 4), np.uint32).view(np.uint8)
    for s in code_object.segments:
        image[s.address : s.address + len(s.data)] = np.frombuffer(s.data, np.uint8)
    image.flags.writeable = False
    return image
