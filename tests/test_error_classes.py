"""Each kind of failure has a class of its own, seen from outside: the API's exception and the command's output."""

import textwrap

import fake_driver
import pytest
import stub_driver
from gristmill import errors
from gristmill.formula import Formula
from gristmill.manifest import Needs, Rule

# Raises what the API raises, then what the command says; both must be of the one class.
PROGRAM = """
import contextlib, io, json, traceback
from gristmill import errors
from gristmill.cli import main

host = fake_driver.random_weight(72, 136, 64, zero_points=True)

def use():
    weight = gristmill.to_device(host, "cuda:0")
    return gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(9, 136), "cuda:0"), weight)

expected = getattr(errors, os.environ["EXPECTED"])
message = fails(expected, use)
assert os.environ["WORDS"] in message, message
forget_loaders()
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = main(["selftest", "--device", "cuda:0", "--json"] if os.environ["COMMAND"] == "selftest" else
                ["why", "--M", "9", "--N", "72", "--K", "136", "--group-size", "64", "--zero-points", "--json"])
assert code == 1, out.getvalue()
if os.environ["COMMAND"] == "why" and expected is NoKernelError:
    assert json.loads(out.getvalue())["entry"] is None  # it explains, rather than fails
else:
    found = json.loads(out.getvalue())["error"]
    assert found["class"] == os.environ["EXPECTED"], found
    assert os.environ["WORDS"] in found["message"] or os.environ["COMMAND"] == "why", found
    assert f": {os.environ['EXPECTED']}: " in err.getvalue(), err.getvalue()
"""


def no_pack(packs):
    packs.rename(packs.parent / "elsewhere")


def replace(old, new):
    def change(packs):
        path = packs / "sm90" / "manifest.json"
        path.write_bytes(path.read_bytes().replace(old, new))

    return change


def alter_object(packs):
    for path in packs.glob("sm90/objects/*"):
        path.write_bytes(b"STUB\nanother kernel 8\n")


def cut_manifest(packs):
    path = packs / "sm90" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])


def narrow_pack(packs):
    no_pack(packs)
    code = stub_driver.code_of(["symbol_only"])
    entry = fake_driver.entry("only", code, needs=Needs("float16", True, (Formula("M <= 4"),)))
    fake_driver.write_pack(packs, "sm90", [(entry, code)], (Rule(Formula("1"), ("only",), "test"),))


KINDS = {
    "no device": ("NoDeviceError", "the NVIDIA driver sees 0", "selftest", None, {"STUB_DEVICES": ""}),
    "no driver": ("NoDriverError", "libcuda.so.1 cannot be loaded", "selftest", None, {"LD_LIBRARY_PATH": "/nowhere"}),
    "driver does not start": ("NoDriverError", "cuInit failed", "selftest", None, {"STUB_FAIL": "cuInit=803"}),
    "no pack": ("NoPackError", "pip install gristmill-sm90", "selftest", no_pack, {}),
    "no pack is made": ("NoPackError", "no pack is made for sm75", "selftest", None, {"STUB_DEVICES": "7.5"}),
    "pack too new": ("PackTooNewError", "pip install --upgrade gristmill", "selftest",
                     replace(b'"schema": 1', b'"schema": 99'), {}),
    "pack too old": ("PackTooOldError", "pip install --upgrade gristmill-sm90", "selftest",
                     replace(b'"schema": 1', b'"schema": 0'), {}),
    "damaged object": ("DamagedPackError", "the manifest says", "selftest", alter_object, {}),
    "damaged manifest": ("ManifestError", "manifest.json: file: not JSON", "selftest", cut_manifest, {}),
    "unsupported problem": ("NoKernelError", "only: needs M <= 4, got M=9", "why", narrow_pack, {}),
    "driver failure": ("DriverError", "cuModuleLoadData failed: NAME_OF_2 (stub text of code 2)", "selftest", None,
                       {"STUB_FAIL": "cuModuleLoadData=2"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory):
    return stub_driver.build(
        stub_driver.TESTS / "stub_cuda/stub_cuda.c", tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_from_outside(kind, stub_library, tmp_path):
    expected, words, command, change, settings = KINDS[kind]
    fake_driver.usual_pack(tmp_path / "packs", "sm90", stub_driver.code_of)
    if change is not None:
        change(tmp_path / "packs")
    settings = {"EXPECTED": expected, "WORDS": words, "COMMAND": command, **settings}
    if settings.get("LD_LIBRARY_PATH"):
        stub_driver.skip_where_installed("libcuda.so.1")
    stub_driver.run(stub_library, tmp_path, textwrap.dedent(PROGRAM), **settings)


def test_no_class_stands_for_another_kind():
    """Whoever catches one kind does not catch another by it; all have one base."""
    kinds = {
        "no device": errors.NoDeviceError, "no driver": errors.NoDriverError, "no pack": errors.NoPackError,
        "pack too new": errors.PackTooNewError, "pack too old": errors.PackTooOldError,
        "damaged pack": errors.DamagedPackError, "unsupported problem": errors.NoKernelError,
        "driver failure": errors.DriverError, "fork": errors.ForkedProcessError, "not loaded": errors.NotLoadedError,
        "argument": errors.ArgumentError, "limit": errors.PreloadLimitError, "strict": errors.StrictModeError,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert issubclass(kind, errors.GristmillError)
        assert [other for other, found in kinds.items() if issubclass(found, kind)] == [name]
    assert issubclass(errors.ManifestError, errors.DamagedPackError)
