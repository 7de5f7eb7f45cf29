"""From rows to packs: complete or not at all, nothing done twice, the same bytes anywhere."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from gristmill.aot.build import build_packs
from gristmill.aot.code_object import check_paths, read_facts
from gristmill.aot.errors import BuildError, CompileError, ObjectError, ToolchainError
from gristmill.aot.ninja_graph import MAX_BATCH, make_batches
from gristmill.aot.pack import check_pack
from gristmill.cli import main
from gristmill.packs import Pack, find_pack
from tiny_rows import ARCHS

KERNELS = (Path(__file__).parent / "tiny_kernels.py").read_text()


def content(folder: Path) -> dict[str, bytes]:
    """All files below `folder`, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("arch", ARCHS)
def test_pack_reads_back_with_its_rows_and_objects(tiny_packs, arch):
    pack = find_pack(arch, [tiny_packs / arch])
    entries = pack.manifest.entries
    assert list(entries) == ["tiny", "tiny_16", "floor"]
    for entry in entries.values():
        facts = read_facts(pack.read_object(entry), pack.manifest.kind, entry.symbol)
        assert facts.arch == arch
        assert entry.resources == facts.resources
        assert entry.block == (64, 1, 1)
        assert entry.source == "tiny_kernels.py"
        assert entry.static_shared_bytes == 0
    assert entries["tiny"].dynamic_shared_bytes({}) > entries["tiny_16"].dynamic_shared_bytes({}) > 0
    assert [argument.name for argument in entries["tiny"].arguments] == [
        "x", "qweight", "out", "M", "N", "global_scratch", "profile_scratch",
    ]  # fmt: skip
    assert [rule.entries for rule in pack.manifest.policy] == [("tiny_16", "tiny"), ("floor",)]
    assert pack.manifest.compilers["triton"] == "3.9.0"
    assert {"ptxas", "llvm"} & pack.manifest.compilers.keys()
    assert check_pack(tiny_packs / arch).manifest == pack.manifest


def test_entries_of_one_object_share_its_file(tiny_packs):
    pack = Pack.open(tiny_packs / "sm90")
    entries = pack.manifest.entries
    assert entries["tiny"].object == entries["floor"].object != entries["tiny_16"].object
    assert len(list((tiny_packs / "sm90" / "objects").iterdir())) == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_pack_holds_no_path(tiny_packs, arch):
    folders = [tiny_packs, Path.home(), Path(sys.prefix), Path(__file__).parent, Path.cwd()]
    for name, data in content(tiny_packs / arch).items():
        check_paths(data, name, folders)


def test_second_build_compiles_nothing_and_touches_nothing(build, tmp_path):
    (first,), said = build()
    assert "compiling 2 variants" in said
    assert (first.entries, first.objects, first.compiled, first.changed) == (3, 2, 3, True)
    assert first.compile_seconds > 0
    before = times(tmp_path)
    (second,), said = build()
    assert said == ""
    assert (second.entries, second.objects, second.compiled, second.changed) == (3, 2, 0, False)
    assert times(tmp_path) == before


def test_cold_builds_in_two_places_give_the_same_bytes(build, tmp_path, tiny_packs):
    build(("sm80", "gfx1201"), out="one/packs", cache="one/cache", jobs=1)
    build(("sm80", "gfx1201"), out="two/far/away/packs", cache="two/cache", jobs=3)
    one, two = content(tmp_path / "one" / "packs"), content(tmp_path / "two/far/away/packs")
    assert one == two
    assert len(one) == 6
    assert {name: data for name, data in one.items() if name.startswith("sm80/")} == {
        f"sm80/{name}": data for name, data in content(tiny_packs / "sm80").items()
    }


def test_builds_into_one_folder_at_once_do_not_meet(tmp_path):
    """The second build starts when the first has a batch behind it, and ends before it."""
    reports = []

    def build(arch: str, progress: io.StringIO) -> None:
        reports.extend(build_packs([arch], tmp_path / "packs", tmp_path / "cache", 1, progress, ("tiny_rows",)))

    class Progress(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("[1/"):
                build("sm90", io.StringIO())
            return super().write(text)

    build("sm80", Progress())
    assert [report.arch for report in reports] == ["sm90", "sm80"]
    assert sorted(path.name for path in (tmp_path / "packs").iterdir()) == ["sm80", "sm90"]


def test_damaged_cache_entry_is_built_again(build, tmp_path):
    (first,), _ = build()
    before = content(first.folder)
    (victim, _) = sorted((tmp_path / "cache").glob("*/*/object"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    (second,), said = build()
    assert "is damaged" in said
    assert "compiling 1 variants" in said
    assert content(second.folder) == before


def test_changed_kernel_and_changed_row_are_built_again_and_old_objects_go(build, rows_of, tmp_path):
    build(rows=rows_of(KERNELS, ("one", "two")))
    old = content(tmp_path / "packs" / "sm80")
    (report,), _ = build(rows=rows_of(KERNELS.replace("tl.dot(a, b)", "(tl.dot(a, b) + 1)"), ("one", "two")))
    new = content(tmp_path / "packs" / "sm80")
    assert report.compiled == 2
    assert len(new) == len(old) == 2
    assert not {name for name in new if name.startswith("objects/")} & old.keys()
    assert json.loads(new["manifest.json"])["source_digest"] != json.loads(old["manifest.json"])["source_digest"]
    (report,), _ = build(rows=rows_of(KERNELS, ("one", "two"), "num_warps=4"))
    assert report.compiled == 2


def test_change_of_a_module_that_the_kernel_imports_is_seen(build, rows_of, tmp_path):
    kernel = KERNELS.replace("import triton\n", "import triton\nfrom helper_of_kernel import ADD\n", 1)
    kernel = kernel.replace("tl.dot(a, b)", "(tl.dot(a, b) + ADD)")
    rows = rows_of(kernel)
    (folder,) = tmp_path.glob("sources*")
    helper = folder / "helper_of_kernel.py"
    helper.write_text("import triton.language as tl\nADD = tl.constexpr(1)\n")
    edited = helper.stat().st_mtime
    (first,), _ = build(rows=rows)
    before = content(first.folder)
    helper.write_text("import triton.language as tl\nADD = tl.constexpr(2)\n")
    os.utime(helper, (edited, edited))  # in the same second, and of the same size: bytecode would pass for fresh
    (second,), _ = build(rows=rows)
    assert (first.compiled, second.compiled) == (1, 1)
    assert content(second.folder).keys() != before.keys()


def test_record_of_verification_stays_until_the_pack_changes(build, rows_of):
    (report,), _ = build(rows=rows_of(KERNELS, ("one",), "module='tiny_kernels'"))
    (report.folder / "verified.json").write_text("{}")
    (report,), _ = build(rows=rows_of(KERNELS, ("one",), "module='tiny_kernels'"))
    assert not report.changed
    assert (report.folder / "verified.json").exists()
    (report,), _ = build(rows=rows_of(KERNELS, ("one",), "module='tiny_kernels', roundings=2"))
    assert (report.changed, report.compiled) == (True, 0)
    assert not (report.folder / "verified.json").exists()


def test_pack_stays_when_its_replacement_is_stopped(build, tmp_path, monkeypatch):
    (report,), _ = build()
    (report.folder / "manifest.json").write_text("another")
    before = content(tmp_path / "packs")
    rename = Path.rename

    def stop_at_the_second(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert content(tmp_path / "packs") == before


def test_pack_that_another_build_has_just_moved_away_is_a_build_error(build, monkeypatch):
    (report,), _ = build()
    (report.folder / "manifest.json").write_text("another")
    rename = Path.rename

    def come_late(path: Path, target: Path) -> Path:
        if path == report.folder:
            shutil.rmtree(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", come_late)
    with pytest.raises(BuildError, match=r"cannot write the pack .*sm80: .*No such file.*; if another build writes it"):
        build()


FAILURES = {
    "name": (
        KERNELS.replace("tl.dot(a, b)", "tl.dot(a, no_such_name)"),
        r"CompilationError.*no_such_name is not defined",
    ),
    "shape": (KERNELS.replace("tl.dot(a, b)", "tl.dot(a, row)"), r"equal ranks"),
    "abort": (
        KERNELS + "\nimport os\nos.write(2, b'LLVM ERROR: out of words')\nos.abort()\n",
        "LLVM ERROR: out of words",
    ),
    "silent": (KERNELS + "\nimport os\nos._exit(9)\n", "the compiler ended without a word"),
    "ptxas": (KERNELS, r"ptxas.*Unknown option|Unknown option"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failing_variant_fails_the_build_with_its_name_and_the_compilers_words(failure, build, rows_of, tmp_path):
    kernel, words = FAILURES[failure]
    changes = "options={'ptx_options': '--no-such-option'}" if failure == "ptxas" else ""
    with pytest.raises(CompileError) as caught:
        build(rows=rows_of(kernel, ("bad",), changes))
    assert "sm80: variant bad does not compile" in str(caught.value)
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert not (tmp_path / "packs" / "sm80").exists()
    assert not list((tmp_path / "cache").rglob("object"))


def test_build_that_was_stopped_says_so(build, rows_of):
    with pytest.raises(BuildError, match="the build was interrupted; what was compiled is in the cache"):
        build(rows=rows_of(KERNELS + "\nimport os\nos.kill(os.getpid(), 2)\n"))


def test_source_that_is_edited_while_it_compiles_is_not_stored_under_its_old_key(build, rows_of, tmp_path):
    edits_itself = KERNELS + "\nwith open(__file__, 'a') as file:\n    file.write('# edited\\n')\n"
    with pytest.raises(CompileError, match="the sources of one changed while the build ran; build again"):
        build(rows=rows_of(edits_itself))
    assert not list((tmp_path / "cache").rglob("object"))


def test_one_failing_arch_leaves_all_packs_alone_and_the_cache_has_the_rest(build, rows_of, tmp_path):
    rows = rows_of(KERNELS, ("one", "two"), "options={'maxnreg': 64 if name == 'one' else 128}")
    with pytest.raises(CompileError, match=r"gfx1201: variant (one|two) does not compile\s.*no option 'maxnreg'"):
        build(("sm80", "gfx1201"), rows=rows, jobs=1)
    assert not (tmp_path / "packs" / "sm80").exists()
    (report,), _ = build(("sm80",), rows=rows)
    assert report.compiled == 0


def test_kernel_source_with_a_syntax_error_is_quoted(build, rows_of):
    with pytest.raises(BuildError, match=r"kernel\d+: line 3: .*: def broken\(:"):
        build(rows=rows_of("import triton\n\ndef broken(:\n    pass\n"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("grid=('ceil_div(M', '1', '1')", r"sm80: one: formula 'ceil_div\(M'"),
        ("conditions=('no_name > 0',)", r"sm80: .*names no_name"),
        ("op='conv'", "sm80: .*op must be 'w4a16_gemm', got 'conv'"),
        ("constexprs={'BLOCK': object()}", "one: constant 'BLOCK' is a object; a row holds plain values"),
    ],
)
def test_row_that_makes_no_valid_entry_is_refused(changes, message, build, rows_of, tmp_path):
    with pytest.raises(BuildError, match=message):
        build(rows=rows_of(KERNELS, ("one",), changes))
    assert not (tmp_path / "packs" / "sm80").exists()


def test_two_rows_of_one_name_are_refused(build, rows_of):
    with pytest.raises(BuildError, match="sm80: variants of one name: one"):
        build(rows=rows_of(KERNELS, ("one", "one")))


def test_spills_are_reported(build, rows_of):
    changes = "function='crowded', num_warps=1, options={'maxnreg': 40}"
    (report,), _ = build(rows=rows_of(KERNELS, ("hungry",), changes))
    assert report.spilled["hungry"] > 0


@pytest.mark.parametrize("module", ["triton", "ninja", "elftools", "msgpack"])
def test_missing_tool_names_package_and_command(module, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    package = {"elftools": "pyelftools"}.get(module, module)
    assert main(["build", "--arch", "sm80", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"building packs needs {package}; run: pip install 'gristmill[build]'" in message


def test_missing_tool_is_a_toolchain_error(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ToolchainError):
        build()


def test_check_pack_finds_what_is_wrong(build, tmp_path):
    (report,), _ = build()
    check_pack(report.folder)
    (report.folder / "objects" / "stray.cubin").write_bytes(b"")
    with pytest.raises(ObjectError, match=r"files that no entry names: objects/stray\.cubin"):
        check_pack(report.folder)
    (report.folder / "objects" / "stray.cubin").unlink()
    moved = tmp_path / "sm90"
    report.folder.rename(moved)
    with pytest.raises(ObjectError, match="sm90 holds the pack of sm80"):
        check_pack(moved)


def test_batches_hold_every_variant_once_and_keep_all_jobs_busy():
    for count in (1, 2, 7, 48, 200, 1000):
        for jobs in (1, 2, 16):
            missing = {arch: {f"v{i}": f"{arch}{i}" for i in range(count)} for arch in ("sm80", "sm90")}
            batches = make_batches(missing, jobs)
            assert len({batch.name for batch in batches}) == len(batches)
            for arch, variants in missing.items():
                dealt = [item for batch in batches if batch.arch == arch for item in batch.variants.items()]
                assert sorted(dealt) == sorted(variants.items())
            sizes = [len(batch.variants) for batch in batches]
            assert max(sizes) <= MAX_BATCH
            assert len(batches) >= min(2 * count, jobs)


def test_command_prints_one_json_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gristmill.aot.build.ROW_MODULES", ("tiny_rows",))
    monkeypatch.setattr("gristmill.aot.build.build_packs.__defaults__", (("tiny_rows",),))
    arguments = ["build", "--arch", "sm80", "--out", str(tmp_path / "p"), "--cache", str(tmp_path / "c")]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [pack["arch"] for pack in document["packs"]] == ["sm80"]
    assert document["packs"][0]["entries"] == 3
    assert "compiling 2 variants" in captured.err
    assert main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["arch", "entries", "objects", "bytes"]
    assert table[1].split()[:3] == ["sm80", "3", "2"]
    assert table[1].endswith("(unchanged)")
