"""The pages say what is there: paths, links, commands, variables, fields, and the README's example.

Commands and programs are run by test_pages_run.py, messages raised by test_errors_page.py.
"""

import ast
import json
import re
from importlib.metadata import entry_points

import pages
import pytest
from gristmill import environment
from gristmill.aot import environment as build_environment
from gristmill.aot.targets import TARGETS
from gristmill.device import PACKS_FOR_ARCH
from gristmill.formula import FUNCTIONS, Formula
from gristmill.manifest import (
    ARGUMENT_NAMES,
    ARGUMENT_TYPES,
    DEVICE_NAMES,
    PROBLEM_NAMES,
    SCHEMA,
    Entry,
    Manifest,
    Needs,
    Rule,
)
from gristmill.verified import HOW, Record, read_records

ROOT = pages.ROOT
FOLDERS = "aot|build_scripts|csrc|dispatch|docs|kernels|tests"
DEPLOYMENT = ROOT / "docs" / "deployment.md"
FORMAT = ROOT / "docs" / "pack-format.md"

every_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)


@every_page
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text))
    named |= set(re.findall(rf"(?:python3? )((?:{FOLDERS})/[\w./-]*)", text))
    for path in named - {"aot/records/ARCH.json"}:
        assert (ROOT / path).exists(), path


@every_page
def test_every_link_leads_somewhere(page):
    for target, _, heading in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert heading in map(pages.anchor, headings), f"{target}#{heading}"


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in readme, page.name


@every_page
def test_every_command_that_a_page_names_exists(page):
    commands = {point.name for point in entry_points(group="gristmill.commands")}
    named = set(re.findall(r"`gristmill ([a-z]+)\b", page.read_text()))
    for block in pages.blocks("sh", pages=[page]):
        named |= {command.split()[1] for command in block.commands if command.startswith("gristmill ")}
    assert named <= commands, named - commands


def test_no_block_is_of_a_kind_that_no_test_looks_into():
    for block in pages.blocks():
        assert block.language in pages.LANGUAGES, block
    fences = [line for page in pages.PAGES for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(pages.blocks()), "a fence that is indented or not closed"


def test_every_arch_is_in_the_readme_and_the_deployment_page():
    readme, deployment = (ROOT / "README.md").read_text(), DEPLOYMENT.read_text()
    for arch in TARGETS:
        assert f"| {arch} |" in readme
        assert f"`gristmill-{arch}`" in deployment


def test_the_readmes_example_runs():
    torch = pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(example.replace('"cuda"', '"cpu"'), names)
    assert names["y"].shape == (5, 4096)
    assert names["y"].dtype == torch.float16
    assert torch.isfinite(names["y"]).all()


# --- Environment variables ------------------------------------------------------------------------------------


def variables_in(path) -> set[str]:
    """Names that the code of `path` looks up in the environment."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            found.add(ast.literal_eval(node.args[0]))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            found |= {ast.literal_eval(node.slice)} if isinstance(node.slice, ast.Constant) else set()
    return found


def test_every_variable_that_is_read_is_in_the_table():
    files = [ROOT / "setup.py", *(path for folder in ("dispatch", "aot") for path in (ROOT / folder).rglob("*.py"))]
    read = set().union(*map(variables_in, files))
    parts = re.split(r"^When building:\n", DEPLOYMENT.read_text().partition("## Environment variables")[2], flags=re.M)
    run_time, building = ({row[0] for row in pages.table_rows(part)} for part in parts)
    assert run_time | building == read
    assert run_time == {row[0] for row in pages.table_rows(environment.__doc__)}
    assert building - {"GRISTMILL_EXTENSION"} == {row[0] for row in pages.table_rows(build_environment.__doc__)}


# --- The pack format ------------------------------------------------------------------------------------------


MANIFEST_FIELDS = {"schema", *Manifest._fields} - {"signatures"}  # which follows from the entries


def test_every_field_of_a_pack_is_on_its_page():
    text = FORMAT.read_text()
    fields = {*MANIFEST_FIELDS, *Entry._fields, *Needs._fields, *Rule._fields, *Record.__dataclass_fields__}
    names = {*ARGUMENT_NAMES, *PROBLEM_NAMES, *DEVICE_NAMES}
    for name in fields | names:
        assert f"`{name}`" in text, name
    for name in {*ARGUMENT_TYPES, *HOW}:
        assert f'"{name}"' in text, name
    assert all(re.search(rf"\b{name}\b", text) for name in FUNCTIONS)
    assert f"`schema` is {SCHEMA}." in text


def test_tables_of_the_pack_format_have_no_field_that_is_not_there():
    known = {*MANIFEST_FIELDS, *Entry._fields}
    named = {name for row in pages.table_rows(FORMAT.read_text()) for name in re.findall(r"`(\w+)`", row[0])}
    assert named == known


def test_the_examples_of_the_pack_format_are_valid():
    manifest_text, records_text = (block.text for block in pages.blocks("json", pages=[FORMAT]))
    manifest = Manifest.parse(manifest_text.encode())
    (entry,) = manifest.entries.values()
    assert json.loads(manifest.dump()) == json.loads(manifest_text), "no field too many, none too few"
    (record,) = read_records(records_text.encode(), "example").items()
    assert record[0] == entry.name
    assert record[1].object == entry.object


def test_the_formulas_of_the_pack_format_are_formulas():
    lines = re.findall(r"^    (\".*)$", pages.sections(FORMAT, "##")["Formulas"], re.MULTILINE)
    formulas = [text for line in lines for text in json.loads("{" + line + "}").popitem()[1]]
    assert len(formulas) == 5
    assert all(Formula(text).names <= PROBLEM_NAMES | DEVICE_NAMES for text in formulas)


def test_limits_of_the_pack_format_are_the_codes():
    from gristmill.formula import MAX_DEPTH, MAX_LENGTH
    from gristmill.manifest import MAX_ARGUMENTS, MAX_BYTES
    from gristmill.packs import MAX_OBJECT_BYTES

    text = " ".join(FORMAT.read_text().split())
    assert f"A manifest has {MAX_BYTES // 2**20} MiB at most, an object {MAX_OBJECT_BYTES // 2**20} MiB." in text
    assert f"of at most {MAX_LENGTH} characters and {MAX_DEPTH} brackets within brackets" in text
    assert f"`[name, type]`, {MAX_ARGUMENTS} at most" in text


def test_packs_named_on_the_deployment_page_are_made():
    served = {pack for packs in PACKS_FOR_ARCH.values() for pack in packs}
    named = set(re.findall(r"`gristmill-((?:sm|gfx)\d+)`", DEPLOYMENT.read_text()))
    assert named == served
