"""The coverage table: what it says, and that what is lost shows."""

import json
from pathlib import Path

import fake_driver
import pytest
from gristmill.aot.coverage import TABLE, check_coverage, coverage_table, sections
from gristmill.aot.errors import WheelError
from gristmill.aot.targets import TARGETS
from gristmill.cli import main
from gristmill.errors import NoPackError
from gristmill.formula import Formula
from gristmill.manifest import Manifest, Needs, Rule
from gristmill.packs import find_pack

ROOT = Path(__file__).parents[2]


def manifest(arch: str = "sm90", dropped: str = "", shared: str = "4096", when: str = "1") -> Manifest:
    """A small-M kernel for groups from 32 up, a tile kernel for aligned tensors, and a floor; one may be `dropped`.

    `shared` is the small-M kernel's shared memory, `when` the condition of its rule.
    """
    kinds = {
        "small": ("csrc/small.cu", (Formula("M <= 4"), Formula("group_size % 32 == 0 or group_size >= K"))),
        "tile": ("kernels/tile.py", (Formula("alignment % 16 == 0"),)),
        "floor": ("kernels/tile.py", ()),
    }
    names = [kind for kind in kinds if kind != dropped]
    entries = {}
    for dtype in ("float16", "bfloat16"):
        for name in names:
            source, conditions = kinds[name]
            row = fake_driver.entry(
                f"{name}_{dtype}",
                b"",
                needs=Needs(dtype, False, conditions),
                source=source,
                dynamic_shared_bytes=Formula(shared if name == "small" else "4096"),
            )
            entries[row.name] = row
    rules = tuple(
        Rule(Formula(when if name == "small" else "1"), tuple(n for n in entries if n.startswith(name)), "test")
        for name in names
    )
    return Manifest.of(
        entries.values(), rules, arch=arch, kind="cubin", version="0", compilers={}, source_digest="0" * 64
    )


def test_a_row_says_what_serves_which_m():
    table = coverage_table([manifest()])
    assert "| w4a16_gemm | float16 | no | 8 | 1.. tile.py | 1.. floor |" in table
    assert (
        "| w4a16_gemm | float16 | no | 32, 64, 128, 256, K | 1..4 small.cu; 5.. tile.py | 1..4 small.cu; 5.. floor |"
    ) in table
    assert "| w4a16_gemm | float16 | yes | 8, 32, 64, 128, 256, K | 1.. NONE | 1.. NONE |" in table
    assert "Pack sm90, 6 entries: 2 of small.cu, 4 of tile.py." in table


def test_an_arch_that_runs_anothers_pack_has_its_own_section_with_its_own_shared_memory():
    found = sections([manifest("sm80", shared="110000")])
    assert list(found) == ["sm80", "sm86", "sm87", "sm89"]
    assert "small.cu;" in found["sm80"]
    assert "small.cu;" not in found["sm86"]


def test_where_n_and_k_decide_both_kernels_are_named():
    assert "1..4 small.cu or tile.py; 5.. tile.py" in coverage_table([manifest(when="N >= 4096")])


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (
            manifest("sm90", "small"),
            "-| w4a16_gemm | float16 | no | 32, 64, 128, 256, K | 1..4 small.cu; 5.. tile.py |",
        ),
        (manifest("sm90", "floor"), "-| w4a16_gemm | float16 | no | 8 | 1.. tile.py | 1.. floor |"),
    ],
)
def test_what_is_lost_shows_as_a_diff(now, lost, tmp_path):
    path = tmp_path / "coverage.md"
    path.write_text(coverage_table([manifest(), manifest("gfx1201")]))
    check_coverage([manifest()], path)
    with pytest.raises(WheelError) as caught:
        check_coverage([now], path)
    assert f"run: gristmill coverage --write {path}\n" in str(caught.value)
    assert lost in str(caught.value)
    assert "+| w4a16_gemm | float16" in str(caught.value)


def test_an_arch_that_is_lost_shows_where_all_are_compared(tmp_path):
    path = tmp_path / "coverage.md"
    path.write_text(coverage_table([manifest(), manifest("gfx1201")]))
    check_coverage([manifest(), manifest("gfx1201")], path, whole=True)
    with pytest.raises(WheelError, match="-## gfx1201"):
        check_coverage([manifest()], path, whole=True)
    path.write_text(coverage_table([manifest()]))
    with pytest.raises(WheelError, match=r"\+## gfx1201"):
        check_coverage([manifest(), manifest("gfx1201")], path)


def test_the_command_writes_checks_and_prints(tmp_path, capsys):
    fake_driver.usual_pack(tmp_path / "packs")
    packs, path = ["--packs", str(tmp_path / "packs")], tmp_path / "coverage.md"
    assert main(["coverage", *packs, "--check", str(path)]) == 1
    assert f"{path}: No such file or directory; run: gristmill coverage --write {path}" in capsys.readouterr().err
    assert main(["coverage", *packs, "--write", str(path)]) == 0
    assert main(["coverage", *packs, "--check", str(path)]) == 0
    capsys.readouterr()
    assert main(["coverage", *packs]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert main(["coverage", *packs, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["sections"]) == ["sm90"]
    path.write_text(path.read_text().replace("tiled.py", "gone.py").replace("floor", "flour"))
    assert main(["coverage", *packs, "--check", str(path)]) == 1
    assert main(["coverage", "--packs", str(tmp_path / "none")]) == 1


def test_the_page_that_is_checked_in_is_what_the_packs_cover():
    try:
        manifests = [find_pack(arch).manifest for arch in TARGETS]
    except NoPackError as error:
        pytest.skip(f"packs of all archs are needed: {error}")
    check_coverage(manifests, ROOT / TABLE, whole=True)
