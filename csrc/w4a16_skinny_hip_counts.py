"""What binds the HIP decode kernels: issue slots against memory, from counted instructions.

A prediction of which of the two is used up first, not of a time. Nothing here was measured on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions a weight and lane that the main loop executes, as the emulator counts them.

    A lane multiplies each of its weights by all tokens. A dual-issue instruction counts once.
    """

    valu: float  # vector ALU without WMMA
    wmma: float
    lds: float  # 128-bit reads
    global_memory: float


@dataclass(frozen=True, slots=True)
class Part:
    """Public figures of a common part: what one arch can issue and read."""

    name: str
    simds: int  # 32 lanes wide; two a compute unit
    ghz: float
    gbps: float  # of memory, on paper
    wmma_cycles: int  # that a 16x16x16 multiplication keeps a SIMD busy

    def issue_over_memory(self, counts: Counts, weight_bytes: float) -> float:
        """Time to issue over time to read, for each weight; below 1 memory binds."""
        slots = counts.valu + counts.wmma * self.wmma_cycles
        issue = slots / (32 * self.simds * self.ghz)
        return issue / (weight_bytes / self.gbps)

    def lds_over_memory(self, counts: Counts, weight_bytes: float) -> float:
        """The same for LDS, which gives a compute unit 128 bytes a cycle."""
        lds = counts.lds * 16 / (64 * self.simds * self.ghz)
        return lds / (weight_bytes / self.gbps)


PARTS = {
    # 40 compute units; LPDDR5X-8000 on 256 bits.
    "gfx1151": Part("Radeon 8060S", 80, 2.9, 256, 32),
    # 64 compute units; GDDR6 at 20 Gbit/s on 256 bits.
    "gfx1201": Part("Radeon RX 9070 XT", 128, 2.9, 640, 16),
}


def weight_bytes(group_size: int, zero_points: bool) -> float:
    """Bytes of memory that one weight takes, its share of scale and zero point included."""
    return 0.5 + (4 if zero_points else 2) / group_size


def figures(arch: str, name: str, zero_points: bool) -> Mapping[str, int]:
    """Counts and prediction as `gristmill list --resources` shows them: per 1000 weights, and in percent.

    Of the entry `name`; none until its instructions are counted.
    """
    counts = COUNTS[arch].get(name)
    if counts is None:
        return {}
    read = weight_bytes(128, zero_points)
    return {
        "valu_per_1000_weights": round(1000 * counts.valu),
        "wmma_per_1000_weights": round(1000 * counts.wmma),
        "lds_reads_per_1000_weights": round(1000 * counts.lds),
        "global_loads_per_1000_weights": round(1000 * counts.global_memory),
        "issue_percent_of_memory_time_predicted": round(100 * PARTS[arch].issue_over_memory(counts, read)),
        "lds_percent_of_memory_time_predicted": round(100 * PARTS[arch].lds_over_memory(counts, read)),
    }


# Counted by `python tests/hip_kernels.py counts`; a test compares some of them with what the kernels are now.
COUNTS = {
    "gfx1151": {
        "w4a16_skinny_fp16_m1": Counts(1.816, 0.0, 0.062, 0.078),
        "w4a16_skinny_fp16_z_m1": Counts(2.449, 0.0, 0.062, 0.109),
        "w4a16_skinny_bf16_m1": Counts(3.508, 0.0, 0.062, 0.078),
        "w4a16_skinny_bf16_z_m1": Counts(3.715, 0.0, 0.062, 0.109),
        "w4a16_skinny_fp16_m2": Counts(2.348, 0.0, 0.125, 0.078),
        "w4a16_skinny_fp16_z_m2": Counts(2.961, 0.0, 0.125, 0.109),
        "w4a16_skinny_bf16_m2": Counts(3.988, 0.0, 0.125, 0.078),
        "w4a16_skinny_bf16_z_m2": Counts(4.27, 0.0, 0.125, 0.109),
        "w4a16_skinny_fp16_m3": Counts(2.93, 0.0, 0.188, 0.078),
        "w4a16_skinny_fp16_z_m3": Counts(3.516, 0.0, 0.188, 0.109),
        "w4a16_skinny_bf16_m3": Counts(4.504, 0.0, 0.188, 0.078),
        "w4a16_skinny_bf16_z_m3": Counts(4.793, 0.0, 0.188, 0.109),
        "w4a16_skinny_fp16_m4": Counts(3.445, 0.0, 0.25, 0.078),
        "w4a16_skinny_fp16_z_m4": Counts(3.938, 0.0, 0.25, 0.109),
        "w4a16_skinny_bf16_m4": Counts(4.98, 0.0, 0.25, 0.078),
        "w4a16_skinny_bf16_z_m4": Counts(5.324, 0.0, 0.25, 0.109),
        "w4a16_skinny_fp16_m6": Counts(4.426, 0.0, 0.375, 0.078),
        "w4a16_skinny_fp16_z_m6": Counts(5.027, 0.0, 0.375, 0.109),
        "w4a16_skinny_bf16_m6": Counts(6.082, 0.0, 0.375, 0.078),
        "w4a16_skinny_bf16_z_m6": Counts(6.383, 0.0, 0.375, 0.109),
        "w4a16_skinny_fp16_m8": Counts(5.426, 0.0, 0.5, 0.078),
        "w4a16_skinny_fp16_z_m8": Counts(5.996, 0.0, 0.5, 0.109),
        "w4a16_skinny_bf16_m8": Counts(7.086, 0.0, 0.5, 0.078),
        "w4a16_skinny_bf16_z_m8": Counts(7.453, 0.0, 0.5, 0.109),
        "w4a16_skinny_fp16_m2_any_group": Counts(2.934, 0.0, 0.125, 0.172),
        "w4a16_skinny_fp16_z_m2_any_group": Counts(3.926, 0.0, 0.125, 0.297),
        "w4a16_skinny_bf16_m2_any_group": Counts(4.527, 0.0, 0.125, 0.172),
        "w4a16_skinny_bf16_z_m2_any_group": Counts(5.031, 0.0, 0.125, 0.297),
        "w4a16_skinny_fp16_m8_any_group": Counts(6.891, 0.0, 0.5, 0.172),
        "w4a16_skinny_fp16_z_m8_any_group": Counts(7.87, 0.0, 0.5, 0.297),
        "w4a16_skinny_bf16_m8_any_group": Counts(8.177, 0.0, 0.5, 0.172),
        "w4a16_skinny_bf16_z_m8_any_group": Counts(8.781, 0.0, 0.5, 0.297),
        "w4a16_skinny_fp16_wmma_m16": Counts(3.094, 0.125, 0.0, 0.25),
        "w4a16_skinny_fp16_z_wmma_m16": Counts(4.406, 0.125, 0.0, 0.312),
        "w4a16_skinny_bf16_wmma_m16": Counts(6.086, 0.125, 0.0, 0.25),
        "w4a16_skinny_bf16_z_wmma_m16": Counts(6.891, 0.125, 0.0, 0.312),
        "w4a16_skinny_fp16_wmma_m32": Counts(3.667, 0.25, 0.0, 0.375),
        "w4a16_skinny_fp16_z_wmma_m32": Counts(4.979, 0.25, 0.0, 0.438),
        "w4a16_skinny_bf16_wmma_m32": Counts(6.625, 0.25, 0.0, 0.375),
        "w4a16_skinny_bf16_z_wmma_m32": Counts(7.479, 0.25, 0.0, 0.438),
    },
    "gfx1201": {
        "w4a16_skinny_fp16_m1": Counts(1.84, 0.0, 0.062, 0.078),
        "w4a16_skinny_fp16_z_m1": Counts(2.465, 0.0, 0.062, 0.109),
        "w4a16_skinny_bf16_m1": Counts(3.398, 0.0, 0.062, 0.078),
        "w4a16_skinny_bf16_z_m1": Counts(3.68, 0.0, 0.062, 0.109),
        "w4a16_skinny_fp16_m2": Counts(2.371, 0.0, 0.125, 0.078),
        "w4a16_skinny_fp16_z_m2": Counts(2.996, 0.0, 0.125, 0.109),
        "w4a16_skinny_bf16_m2": Counts(3.945, 0.0, 0.125, 0.078),
        "w4a16_skinny_bf16_z_m2": Counts(4.223, 0.0, 0.125, 0.109),
        "w4a16_skinny_fp16_m3": Counts(2.902, 0.0, 0.188, 0.078),
        "w4a16_skinny_fp16_z_m3": Counts(3.527, 0.0, 0.188, 0.109),
        "w4a16_skinny_bf16_m3": Counts(4.457, 0.0, 0.188, 0.078),
        "w4a16_skinny_bf16_z_m3": Counts(4.766, 0.0, 0.188, 0.109),
        "w4a16_skinny_fp16_m4": Counts(3.434, 0.0, 0.25, 0.078),
        "w4a16_skinny_fp16_z_m4": Counts(4.059, 0.0, 0.25, 0.109),
        "w4a16_skinny_bf16_m4": Counts(4.996, 0.0, 0.25, 0.078),
        "w4a16_skinny_bf16_z_m4": Counts(5.289, 0.0, 0.25, 0.109),
        "w4a16_skinny_fp16_m6": Counts(4.496, 0.0, 0.375, 0.078),
        "w4a16_skinny_fp16_z_m6": Counts(5.121, 0.0, 0.375, 0.109),
        "w4a16_skinny_bf16_m6": Counts(6.043, 0.0, 0.375, 0.078),
        "w4a16_skinny_bf16_z_m6": Counts(6.371, 0.0, 0.375, 0.109),
        "w4a16_skinny_fp16_m8": Counts(5.555, 0.0, 0.5, 0.078),
        "w4a16_skinny_fp16_z_m8": Counts(6.184, 0.0, 0.5, 0.109),
        "w4a16_skinny_bf16_m8": Counts(7.09, 0.0, 0.5, 0.078),
        "w4a16_skinny_bf16_z_m8": Counts(7.418, 0.0, 0.5, 0.109),
        "w4a16_skinny_fp16_m2_any_group": Counts(2.855, 0.0, 0.125, 0.172),
        "w4a16_skinny_fp16_z_m2_any_group": Counts(3.855, 0.0, 0.125, 0.297),
        "w4a16_skinny_bf16_m2_any_group": Counts(4.477, 0.0, 0.125, 0.172),
        "w4a16_skinny_bf16_z_m2_any_group": Counts(5.055, 0.0, 0.125, 0.297),
        "w4a16_skinny_fp16_m8_any_group": Counts(6.609, 0.0, 0.5, 0.172),
        "w4a16_skinny_fp16_z_m8_any_group": Counts(7.604, 0.0, 0.5, 0.297),
        "w4a16_skinny_bf16_m8_any_group": Counts(8.167, 0.0, 0.5, 0.172),
        "w4a16_skinny_bf16_z_m8_any_group": Counts(8.75, 0.0, 0.5, 0.297),
        "w4a16_skinny_fp16_wmma_m16": Counts(1.938, 0.125, 0.0, 0.188),
        "w4a16_skinny_fp16_z_wmma_m16": Counts(2.75, 0.125, 0.0, 0.25),
        "w4a16_skinny_bf16_wmma_m16": Counts(3.461, 0.125, 0.0, 0.188),
        "w4a16_skinny_bf16_z_wmma_m16": Counts(3.938, 0.125, 0.0, 0.25),
        "w4a16_skinny_fp16_wmma_m32": Counts(2.5, 0.25, 0.0, 0.25),
        "w4a16_skinny_fp16_z_wmma_m32": Counts(3.312, 0.25, 0.0, 0.312),
        "w4a16_skinny_bf16_wmma_m32": Counts(3.677, 0.25, 0.0, 0.25),
        "w4a16_skinny_bf16_z_wmma_m32": Counts(4.375, 0.25, 0.0, 0.312),
    },
}
