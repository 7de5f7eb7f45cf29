"""CUDA variants to cubins without a GPU: target, symbol, same bytes, no paths, resources, error words."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from gristmill.aot import compile_cuda
from gristmill.aot.code_object import ARGUMENT_BYTES, build_machine_folders, check_paths, read_facts
from gristmill.aot.compile_cuda import compile_variant, key_facts
from gristmill.aot.cxx_sources import argument_layout, headers, source_digests, source_file
from gristmill.aot.errors import BuildError, CompileError, ObjectError, ToolchainError
from gristmill.aot.targets import find_target
from gristmill.csrc import w4a16_skinny_cuda_variants as rows
from gristmill.device import NOMINAL_DEVICES
from gristmill.formula import Formula

ARCHES = rows.ARCHES


def one(arch, **defines):
    """The first row of `arch` with these macros."""
    return next(row for row in rows.variants(arch) if defines.items() <= row.defines.items())


@pytest.mark.parametrize("arch", ARCHES)
def test_the_object_is_for_the_target_and_has_the_symbol_and_arguments(arch):
    row = one(arch)
    result = compile_variant(row, find_target(arch))
    facts = read_facts(result.code, "cubin", "w4a16_skinny")
    assert facts.arch == arch
    assert facts.argument_bytes == tuple(ARGUMENT_BYTES[argument.type] for argument in argument_layout(row))
    assert facts.static_shared_bytes == 0
    assert set(result.compilers) == {"nvrtc"}


@pytest.mark.parametrize("arch", ARCHES)
def test_the_same_row_gives_the_same_bytes_from_any_folder(arch, tmp_path, monkeypatch):
    row = one(arch, ZEROS=1)
    first = compile_variant(row, find_target(arch)).code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert compile_variant(row, find_target(arch)).code == first
    check_paths(first, "the object", (*build_machine_folders(), tmp_path))


@pytest.mark.parametrize("arch", ARCHES)
def test_the_main_path_spills_nothing_and_fits_the_registers_it_was_planned_for(arch):
    for row in rows.variants(arch):
        if row.defines["SPAN"] != 128 or row.defines["ZEROS"] or row.defines["BF16"]:
            continue
        facts = read_facts(compile_variant(row, find_target(arch)).code, "cubin", row.symbol)
        threads = row.block[0] * row.defines["MIN_BLOCKS"]
        assert facts.resources["registers"] * threads <= 65536, row.name
        assert facts.resources["spills"] <= 16, row.name


def test_macros_choose_the_code():
    kinds = [one("sm90", BF16=b, ZEROS=z) for b in (0, 1) for z in (0, 1)]
    assert len({compile_variant(row, find_target("sm90")).code for row in kinds}) == 4


def test_the_compilers_words_are_in_the_error():
    row = dataclasses.replace(one("sm90"), defines={**one("sm90").defines, "SPAN": 48})
    with pytest.raises(CompileError, match=r"(?s)w4a16_skinny.*does not compile.*static assertion"):
        compile_variant(row, find_target("sm90"))


def test_a_row_that_does_not_fit_its_kernel_is_refused():
    row = dataclasses.replace(one("sm90"), arguments=one("sm90").arguments[:-1])
    with pytest.raises(ObjectError, match="its row says"):
        compile_variant(row, find_target("sm90"))
    with pytest.raises(BuildError, match="gfx1151 is not"):
        compile_variant(one("sm90"), find_target("gfx1151"))
    with pytest.raises(BuildError, match=r"no source csrc/cuda/none\.cu"):
        compile_variant(dataclasses.replace(one("sm90"), source="csrc/cuda/none.cu"), find_target("sm90"))


def test_a_missing_nvcc_is_named():
    with pytest.raises(ToolchainError, match="no nvcc 'nvcc-of-nowhere'"):
        compile_variant(one("sm90"), find_target("sm90"), nvcc="nvcc-of-nowhere")


def test_a_missing_nvrtc_library_is_named(monkeypatch):
    from cuda.bindings import nvrtc

    def fail():
        raise RuntimeError("no libnvrtc.so.13 found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    with pytest.raises(ToolchainError, match=r"nvidia-cuda-nvrtc .*\(no libnvrtc.so.13 found\); run: pip install"):
        compile_variant(one("sm90"), find_target("sm90"))


def test_variables_of_the_caller_do_not_steer_nvcc(tmp_path, monkeypatch):
    """A stand-in for nvcc writes what it sees of them into its result."""
    seen = "".join(f"${name}" for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH"))
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\nwhile [ "$1" != --output-file ]; do shift; done\necho "[{seen}]" > "$2"\n')
    nvcc.chmod(0o755)
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH"):
        monkeypatch.setenv(name, "-G")
    assert compile_cuda._by_nvcc(one("sm90"), (), str(nvcc)) == b"[]\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA toolkit's nvcc on PATH")
@pytest.mark.parametrize("arch", ARCHES)
def test_nvcc_when_asked_for(arch, tmp_path, monkeypatch):
    row = one(arch)
    first = compile_variant(row, find_target(arch), nvcc="nvcc")
    monkeypatch.chdir(tmp_path)
    assert compile_variant(row, find_target(arch), nvcc="nvcc").code == first.code
    assert set(first.compilers) == {"nvcc"}
    broken = dataclasses.replace(row, defines={**row.defines, "SPAN": 48})
    with pytest.raises(CompileError, match="static assertion"):
        compile_variant(broken, find_target(arch), nvcc="nvcc")


def test_the_key_follows_headers_macros_and_target(tmp_path, monkeypatch):
    row, target = one("sm90"), find_target("sm90")
    included = {"k8x_mma.h", "ptx.h", "weight_ring.h"}
    assert set(source_digests(row)) == {"cuda/w4a16_skinny.cu", *(f"include/{name}" for name in included)}
    assert set(headers(source_file(row))) == included
    before = key_facts(row, target)
    assert key_facts(row, target) == before
    assert key_facts(one("sm90", ZEROS=1), target) != before
    assert key_facts(row, find_target("sm80")) != before


@pytest.mark.parametrize("arch", ARCHES)
def test_rows_are_consistent(arch):
    variants = {row.name: row for row in rows.variants(arch)}
    assert len(variants) == len(rows.variants(arch))
    device = NOMINAL_DEVICES[arch]
    for rule in rows.policy(arch):
        assert set(rule.variants) <= set(variants)
        assert Formula(rule.when).names <= {"M", "N", "K", "group_size", "multiprocessor_count"}
        assert rule.origin
    for row in variants.values():
        for text in (*row.conditions, *row.grid, row.dynamic_shared_bytes):
            Formula(text)
        values = {"M": 1, "N": 4096, "K": 1024, "multiprocessor_count": device.multiprocessor_count}
        values["lds_bytes"] = device.lds_bytes_per_block
        assert Formula(row.dynamic_shared_bytes)(values) <= device.lds_bytes_per_block, row.name
        assert Formula(row.grid[0])(values) % row.defines["CLUSTER"] == 0
        assert row.defines["CLUSTER"] == 1 or arch == "sm90"


def test_no_rows_for_other_archs():
    assert rows.variants("gfx1151") == []
    assert rows.policy("gfx1151") == []
