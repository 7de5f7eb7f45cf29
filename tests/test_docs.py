"""The pages say what is there: each path they name exists, each command parses, the example runs."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "aot|build_scripts|csrc|dispatch|docs|kernels|tests"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text))
    named |= set(re.findall(rf"(?:python3 )((?:{FOLDERS})/[\w./-]*)", text))
    for path in named:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page):
    commands = {point.name for point in entry_points(group="gristmill.commands")}
    blocks = re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "\n".join(blocks).splitlines():
        if line.startswith("gristmill "):
            assert line.split()[1] in commands, line


def test_the_readmes_example_runs():
    torch = pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(example.replace('"cuda"', '"cpu"'), names)
    assert names["y"].shape == (5, 4096)
    assert names["y"].dtype == torch.float16
    assert torch.isfinite(names["y"]).all()
