"""The GPU architectures that packs are built for."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.aot.errors import BuildError


@dataclass(frozen=True, slots=True)
class Target:
    """One arch as its compilers name it."""

    arch: str  # ours: "gfx1151", "sm90"
    backend: str  # Triton's: "hip", "cuda"
    processor: str | int  # Triton's: "gfx1151", 90
    warp_size: int
    kind: str  # of code object: "hsaco", "cubin"

    @property
    def triton(self) -> tuple[str, str | int, int]:
        """The arguments of Triton's GPUTarget."""
        return self.backend, self.processor, self.warp_size


TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        Target("gfx1151", "hip", "gfx1151", 32, "hsaco"),
        Target("gfx1201", "hip", "gfx1201", 32, "hsaco"),
        Target("sm80", "cuda", 80, 32, "cubin"),
        Target("sm90", "cuda", 90, 32, "cubin"),
    )
}


def find_target(arch: str) -> Target:
    """The target of `arch`; BuildError naming the known ones when there is none."""
    if arch not in TARGETS:
        raise BuildError(f"cannot build for {arch!r}; known archs: {', '.join(TARGETS)}")
    return TARGETS[arch]
