"""Resources read from the object itself, compared with what the vendor's own tool says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from gristmill.aot.code_object import read_facts
from gristmill.aot.compile_triton import compile_variant
from gristmill.aot.cubin import CubinError, read_cubin
from gristmill.aot.targets import TARGETS
from tiny_rows import TINY

CROWDED = replace(TINY, function="crowded", constexprs={"BLOCK": 32}, num_warps=1)


def resource_usage(code: bytes, folder: Path) -> dict[str, int]:
    """What cuobjdump of Triton's wheel prints of a cubin."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(code)
    program = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([program, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("variant", [TINY, replace(CROWDED, options={"maxnreg": 40})], ids=["fits", "spills"])
def test_cubin_resources_are_those_of_cuobjdump(arch, variant, tmp_path):
    compiled = compile_variant(variant, TARGETS[arch])
    facts = read_facts(compiled.code, "cubin", compiled.symbol)
    usage = resource_usage(compiled.code, tmp_path)
    reserved = 1024 if arch == "sm90" else 0  # the driver's, outside a block's limit
    assert facts.resources["registers"] == usage["REG"]
    assert facts.resources["spills"] == usage["STACK"] + usage["LOCAL"]
    assert facts.static_shared_bytes == usage["SHARED"] - reserved
    assert (facts.resources["spills"] > 0) == (variant is not TINY)


def test_hsaco_spills_are_its_private_segment():
    compiled = compile_variant(replace(CROWDED, options={"waves_per_eu": 16}), TARGETS["gfx1201"])
    facts = read_facts(compiled.code, "hsaco", compiled.symbol)
    (size,) = re.findall(r"\.private_segment_fixed_size: (\d+)", compiled.assembly)
    assert facts.resources["spills"] == int(size) > 0


def test_cubin_of_another_kernel_is_refused():
    compiled = compile_variant(TINY, TARGETS["sm80"])
    with pytest.raises(CubinError, match=r"no kernel 'other'; symbols: .*tiny"):
        read_cubin(compiled.code, "other")
    with pytest.raises(CubinError, match="not an ELF file"):
        read_cubin(b"no ELF at all", "tiny")
