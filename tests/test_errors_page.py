"""docs/errors.md: each class has its section, each message in it is one that is raised, in the form that it says."""

from __future__ import annotations

import argparse
import errno
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import fake_driver
import gguf_files
import gristmill
import numpy as np
import pages
import pytest
import stub_driver
from gristmill import drivers, errors, packs, strict
from gristmill.aot import cache, cold_start, compile_hip, ninja_graph, sources, targets, toolchain, verify, wheel
from gristmill.aot import code_object as code_objects
from gristmill.aot import errors as build_errors
from gristmill.aot import pack as aot_pack
from gristmill.aot.commands import wheel as wheel_command
from gristmill.aot.emulator.decode import decode
from gristmill.aot.emulator.waits import MissingWait
from gristmill.arrays import DeviceArray
from gristmill.certificate import question_of
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.cli import main
from gristmill.commands import cover as cover_command
from gristmill.commands.output import check_writable
from gristmill.csrc import w4a16_skinny_hip_variants
from gristmill.device import nominal_device
from gristmill.drivers.cuda import CudaDriver
from gristmill.drivers.default import first_device
from gristmill.errors import GristmillError, NoDriverError
from gristmill.formula import Formula
from gristmill.loader import forget_loaders
from gristmill.manifest import Argument, Needs, Rule
from gristmill.packs import Pack, find_pack
from gristmill.selftest import Case, CaseResult

PAGE = pages.ROOT / "docs" / "errors.md"
SECTIONS = pages.sections(PAGE)
K, N = 128, 24


def classes() -> dict[str, type[GristmillError]]:
    """All subclasses of GristmillError that the package defines, by name, and itself."""
    found = {}
    for module in (errors, build_errors, verify):
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, GristmillError) and value.__module__ == module.__name__:
                found[name] = value
    return found


# Never raised themselves; the page says so.
BASES = {"GristmillError", "PackSchemaError"}


def test_every_class_of_the_package_is_known_here():
    """A class that a module of its own defines would be missed by `classes`."""
    package = Path(gristmill.__file__).resolve().parent
    texts = {path: path.read_text() for folder in (package, pages.ROOT / "aot") for path in folder.rglob("*.py")}
    defined = {}
    for text in texts.values():
        defined.update(re.findall(r"^class (\w+)\((\w+)[,)]", text, re.MULTILINE))

    def is_ours(name: str) -> bool:
        return name == "GristmillError" or is_ours(defined.get(name, "")) if name else False

    assert {name for name in defined if is_ours(name)} == classes().keys()


def test_every_class_has_a_section_and_every_section_a_class():
    assert SECTIONS.keys() == classes().keys()


@pytest.mark.parametrize("name", classes())
def test_sections_say_what_to_do(name):
    assert "```text" in SECTIONS[name] or name in BASES
    assert "\nFix: " in SECTIONS[name] or name in BASES


def forms(name: str) -> list[str]:
    """The messages of a section; a line that is indented belongs to the one before it."""
    lines = [
        line for block in re.findall(r"```text\n(.*?)```", SECTIONS[name], re.DOTALL) for line in block.split("\n")
    ]
    joined: list[str] = []
    for line in filter(None, lines):
        if line.startswith(" "):
            joined[-1] += "\n" + line
        else:
            joined.append(line)
    return joined


def matches(form: str, message: str) -> bool:
    """Whether a message has the form: `{...}` stands for anything in its line, and more lines may follow."""
    pattern = ".+?".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", form))
    return re.fullmatch(rf"{pattern}(?:\n(?s:.*))?", message) is not None


def test_matches_is_not_satisfied_by_anything():
    assert matches("no {a} in {b}; run: x", "no cat in box; run: x\nmore")
    assert not matches("no {a} in {b}; run: x", "no cat in box; run: y")
    assert not matches("no {a} in {b}", "oh no cat in box")
    assert not matches("no {a}", "no ")


# --- The mistakes ---------------------------------------------------------------------------------------------


class Machine:
    """A place where mistakes are made: two fake sm90 devices with a pack, a folder, and pytest's patches."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, driver: fake_driver.FakeDriver) -> None:
        self.folder = folder
        self.patch = patch
        self.driver = driver
        self.packs = folder / "packs"
        self.pack = fake_driver.usual_pack(self.packs, "sm90")
        self.manifest = self.pack / "manifest.json"

    def weight(self, device: str = "cuda:0", **options):
        """A weight with nothing loaded."""
        host = fake_driver.random_weight(N, K, 32, **options)
        return host.map(lambda array: DeviceArray.from_numpy(array, device))

    def x(self, M: int = 3, columns: int = K, device: str = "cuda:0", dtype: str = "float16"):
        return DeviceArray.from_numpy(fake_driver.random_x(M, columns, dtype), device)

    def linear(self, x, weight=None, **options):
        return gristmill.linear(x, self.weight() if weight is None else weight, **options)

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path


def overlapping(m):
    weight = fake_driver.random_weight(K, K, 32).map(lambda array: DeviceArray.from_numpy(array, "cuda:0"))
    x = m.x()
    return m.linear(x, weight, out=x)


def copy_on_another_stream(m):
    torch = pytest.importorskip("torch")
    from gristmill import torch_adapter

    m.patch.setattr(torch_adapter, "_current_raw_stream", lambda ordinal: 0)
    weight = gristmill.to_torch(fake_driver.random_weight(N, K, 32), "cpu")
    torch_adapter._launch_into(torch.zeros(2, 3, K).transpose(0, 1), weight, torch.zeros(6, N), 9)


def gradient_through_out(m):
    torch = pytest.importorskip("torch")
    weight = gristmill.to_torch(fake_driver.random_weight(N, K, 32), "cpu")
    gristmill.linear(torch.zeros(3, K, requires_grad=True), weight, out=torch.zeros(3, N))


def strict_of_nonsense(m):
    m.patch.setenv("GRISTMILL_STRICT", "yes")
    strict.enable_as_asked()


def wrong_scales(m):
    gristmill.pack(np.zeros((8, 64), int), np.ones((2, 8)), group_size=32, dtype="float16")


def wrong_group_size(m):
    gristmill.pack(np.zeros((8, 64), int), np.ones((8, 6)), group_size=12, dtype="float16")


def autocast(m):
    torch = pytest.importorskip("torch")
    weight = gristmill.to_torch(fake_driver.random_weight(N, K, 32), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        gristmill.linear(torch.zeros(3, K), weight)


def inner_stride(m):
    m.linear(m.x(6, 2 * K).part(0, (3, K), (2 * K, 2)))


def overlapping_rows(m):
    m.linear(m.x(), out=m.x(8, K).part(0, (3, N), (N - 1, 1)))


def narrow_pack(m):
    row = fake_driver.entry("only", b"", needs=Needs("float16", False, (Formula("M <= 4"),)))
    fake_driver.write_pack(m.folder / "narrow", "sm90", [(row, b"")], (Rule(Formula("1"), ("only",), "test"),))
    m.patch.setenv("GRISTMILL_PACK_PATH", str(m.folder / "narrow"))
    m.linear(m.x(9))


def name_too_long(m):
    m.patch.setenv("GRISTMILL_PACK_PATH", str(m.folder / ("x" * 300)))
    find_pack("sm90")


def unreadable(m):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    m.patch.setattr(packs.os, "listdir", refuse)
    find_pack("sm90")


def cover_without_packs(m):
    m.patch.setenv("GRISTMILL_PACK_PATH", "")
    path = gguf_files.write(m.folder / "m.gguf", {"layer": (np.zeros((8, 18), np.uint8), "Q4_0")})
    parser = argparse.ArgumentParser()
    cover_command.configure(parser)
    cover_command.run(parser.parse_args([str(path)]))


def other_schema(change: int) -> Callable:
    def other(m):
        document = json.loads(m.manifest.read_text())
        document["schema"] += change
        m.manifest.write_text(json.dumps(document))
        find_pack("sm90")

    return other


def missing_object(m):
    for path in m.pack.glob("objects/*"):
        path.unlink()
    m.patch.delenv("GRISTMILL_PACK_PATH")  # as if it were installed
    pack = Pack.open(m.pack)
    pack.read_object(next(iter(pack.manifest.entries.values())))


def altered_object(m):
    for path in m.pack.glob("objects/*"):
        path.write_bytes(b"other")
    m.linear(m.x())


def cut_manifest(m):
    m.manifest.write_bytes(m.manifest.read_bytes()[:-100])
    Pack.open(m.pack)


def wrong_field(m):
    document = json.loads(m.manifest.read_text())
    for entry in document["entries"]:
        entry["roundings"] = "two"
    m.manifest.write_text(json.dumps(document))
    m.linear(m.x())


def no_library(m):
    def fail(*_):
        raise OSError("cannot open shared object file")

    m.patch.setattr("gristmill.drivers.cuda.ctypes.CDLL", fail)
    CudaDriver().device_count()


def no_gpu(m):
    def fail(name):
        raise NoDriverError(f"no {name} library")

    m.patch.setattr("gristmill.drivers.default.get_driver", fail)
    first_device()


def capture(m):
    m.driver.capturing.add(7)
    m.linear(m.x(), stream=7)


def write_strictly(m):
    scope = {"__name__": "gristmill.loader", "path": str(m.folder / "a")}
    exec("def work():\n  open(path, 'w')", scope)
    with strict.enforced():
        scope["work"]()


def write_records_strictly(m):
    with strict.enforced():
        check_writable(m.folder / "records.json", "--record")


def other_format(m):
    data = np.zeros((48, 68), np.uint8)
    GgufCheckpoint(gguf_files.write(m.folder / "m.gguf", {"output.weight": (data, "Q8_0")})).load("output.weight")


def experts(m):
    data = np.zeros((2, 48, 54), np.uint8)
    GgufCheckpoint(gguf_files.write(m.folder / "m.gguf", {"exps.weight": (data, "Q4_0")})).load("exps.weight")


def same_names(m):
    row = w4a16_skinny_hip_variants.variants("gfx1151")[0]
    module = types.ModuleType("rows_of_one_name")
    module.variants, module.policy = lambda arch: [row, row], lambda arch: []
    m.patch.setitem(sys.modules, module.__name__, module)
    sources.read_rows("gfx1151", [module.__name__])


def cache_may_not_be_read(m):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    m.patch.setattr(Path, "exists", refuse)
    cache.ObjectCache(m.folder, print).load("ab" * 32)


def pack_cannot_be_written(m):
    in_the_way = m.write("packs_file", b"")
    aot_pack.write_pack(in_the_way / "sm90", Pack.open(m.pack).manifest, {})


def batch_fails(m):
    (m.folder / "b.status").write_text("some_variant")
    m.write("b.log", b"CompilationError: at 3:4: no_such_name is not defined")
    words = ninja_graph._failure([ninja_graph.Batch("b", "sm90", {})], m.folder)
    raise build_errors.CompileError(words)  # as compile_batches does


def compiler_fails(m):
    compile_hip._run(("false",), m.folder, w4a16_skinny_hip_variants.variants("gfx1151")[0])


def object_of(arch: str, *argument_bytes: int) -> Callable:
    """An object that says so of itself is checked against a row for sm90 with one pointer."""

    def check(m):
        facts = code_objects.ObjectFacts(arch, argument_bytes, 1024, 0, {})
        m.patch.setattr(code_objects, "read_facts", lambda *_: facts)
        code_objects.check_object(b"", targets.find_target("sm90"), "symbol", [Argument("x", "pointer")], 32)

    return check


def pack_in_another_folder(m):
    aot_pack.check_pack(m.pack.rename(m.pack.parent / "sm80"))


def wrong_result(m):
    case = Case(1, 8, 8, 8, False, 16)
    m.patch.setattr(verify, "run_case", lambda *_: CaseResult(case, 3.5, True))
    verify._run(types.SimpleNamespace(entry=fake_driver.entry("e", b"")), None, nominal_device("gfx1151"), case, None)


def emulator_finds_fault(m):
    def fail(*_):
        raise RuntimeError("a race")

    m.patch.setattr(verify, "run_case", fail)
    case = Case(1, 8, 8, 8, False, 16)
    verify._run(types.SimpleNamespace(entry=fake_driver.entry("e", b"")), None, nominal_device("gfx1151"), case, None)


def code_that_does_not_load(m):
    verify.run_code("gfx1151", fake_driver.entry("e", b""), b"no code object")


def verifying_process_dies(m):
    m.patch.setattr(verify, "run_entry", die)
    fake_driver.usual_pack(m.packs, "gfx1151")
    verify.verify_packs([m.packs / "gfx1151"], m.folder / "cache", 1, print)


def die(folder, name):
    os._exit(9)


DUAL_MOVE, LOAD, MOVE = (
    decode(bytes.fromhex(code), 0, address, "rdna3")
    for address, code in enumerate(["040110ca06010202", "000052dc01000402", "0303047e"])
)


def code_that_the_hardware_gets_wrong(m):
    m.patch.setattr(verify.CodeObject, "parse", lambda code: None)
    m.patch.setattr(verify, "vopd_interlock_hazards", lambda _: {"w4a16": [DUAL_MOVE]})
    verify._refuse_hazards(fake_driver.entry("e", b""), b"")


def code_that_does_not_wait(m):
    m.patch.setattr(verify.CodeObject, "parse", lambda code: None)
    m.patch.setattr(verify, "vopd_interlock_hazards", lambda _: {})
    m.patch.setattr(verify, "missing_waits", lambda _: {"w4a16": [MissingWait(MOVE, "v2", LOAD)]})
    verify._refuse_hazards(fake_driver.entry("e", b""), b"")


def no_packs_to_wheel(m):
    parser = argparse.ArgumentParser()
    wheel_command.configure(parser)
    wheel_command.run(parser.parse_args(["--packs", str(m.folder / "nothing")]))


def never_run(m):
    m.patch.setattr(wheel, "check_pack", Pack.open)
    wheel.pack_wheel(m.pack, m.folder / "out", "licence")


def too_large(m):
    def build(command, **_):
        made = Path(command[command.index("--outdir") + 1])
        made.mkdir()
        with zipfile.ZipFile(made / "a.whl", "w") as archive:
            archive.writestr("a", b"content")
        return subprocess.CompletedProcess(command, 0, "")

    m.patch.setattr(wheel.subprocess, "run", build)
    wheel._build({}, {"a": "content"}, m.folder / "out", ["a"], 10)


def bench_program_fails(m):
    m.patch.setattr(cold_start, "PROGRAMS", m.write("program.py", b"raise SystemExit('no GPU here')"))
    cold_start._run("without_torch", m.folder, m.folder)


def bench_result_is_wrong(m):
    m.patch.setattr(cold_start, "_run", lambda *_: {"phases": {}, "worst": 2.5})
    cold_start._row("ours", "without_torch", m.folder, 1)


MISTAKES: dict[str, list[Callable[[Machine], object]]] = {
    "ArgumentError": [
        lambda m: gristmill.pack(np.full((8, 8), 16), np.ones((8, 1)), group_size=-1, dtype="float16"),
        overlapping,
        lambda m: m.linear(m.x(), m.weight(perm=True)),
        copy_on_another_stream,
        gradient_through_out,
        lambda m: gristmill.linear(m.x(), np.zeros((N, K))),
        strict_of_nonsense,
    ],
    "ShapeError": [lambda m: m.linear(m.x(3, K + 8)), wrong_scales, wrong_group_size],
    "DTypeError": [lambda m: m.linear(m.x(dtype="bfloat16")), autocast],
    "StrideError": [inner_stride, overlapping_rows],
    "DeviceMismatchError": [
        lambda m: m.linear(m.x(device="cuda:1")),
        lambda m: gristmill.preload(fake_driver.random_weight(N, K, 32)),
    ],
    "NoKernelError": [narrow_pack],
    "PackError": [unreadable, name_too_long],
    "NoPackError": [lambda m: find_pack("sm80"), lambda m: find_pack("sm75"), cover_without_packs],
    "PackTooNewError": [other_schema(+1)],
    "PackTooOldError": [other_schema(-1)],
    "DamagedPackError": [missing_object, altered_object],
    "ManifestError": [cut_manifest, wrong_field],
    "FormulaError": [lambda m: Formula("N // M")({"N": 1, "M": 0}), lambda m: Formula("M.x")],
    "NoDriverError": [no_library, lambda m: drivers.get_driver("abacus")],
    "NoDeviceError": [no_gpu, lambda m: nominal_device("gfx906")],
    "DriverError": [],
    "ForkedProcessError": [],
    "NotLoadedError": [capture],
    "PreloadLimitError": [lambda m: gristmill.preload(m.weight(), limit_bytes=10)],
    "StrictModeError": [write_strictly, write_records_strictly],
    "CheckpointError": [
        lambda m: GgufCheckpoint(m.write("cut.gguf", b"GGUF\3\0\0\0")),
        lambda m: GgufCheckpoint(m.folder / "nothing.gguf"),
        other_format,
        experts,
    ],
    "CertificateError": [
        lambda m: question_of(m.write("c.json", b"{}")),
        lambda m: question_of(m.folder / "nothing.json"),
    ],
    "BuildError": [
        lambda m: targets.find_target("sm75"),
        same_names,
        cache_may_not_be_read,
        pack_cannot_be_written,
        verifying_process_dies,
    ],
    "ToolchainError": [
        lambda m: toolchain.require({"no_such_module": "no-such-package"}, "building packs"),
        lambda m: compile_hip.rocm_compiler("no-such-clang"),
    ],
    "CompileError": [batch_fails, compiler_fails],
    "ObjectError": [object_of("sm80", 8), object_of("sm90", 4), pack_in_another_folder],
    "VerificationError": [
        wrong_result,
        emulator_finds_fault,
        code_that_does_not_load,
        code_that_the_hardware_gets_wrong,
        code_that_does_not_wait,
    ],
    "WheelError": [no_packs_to_wheel, never_run, too_large],
    "BenchmarkError": [bench_program_fails, bench_result_is_wrong],
}

# Mistakes that need the real driver module: each raises in a process beside the stub libcuda.so.1.
AT_THE_STUB = """
import json
messages = {}

def raised(function, *arguments):
    try:
        function(*arguments)
    except GristmillError as error:
        messages.setdefault(type(error).__name__, []).append(str(error))

cuda = get_driver("cuda")
os.environ["STUB_FAIL"] = "cuInit=803"
raised(cuda.device_facts, 0)
os.environ["STUB_FAIL"] = ""
raised(cuda.device_facts, 5)
cuda.device_facts(0)
host = fake_driver.random_weight(72, 136, 64, zero_points=True)
os.environ["STUB_FAIL"] = "cuModuleLoadData=2"
raised(gristmill.to_device, host, "cuda:0")
os.environ["STUB_FAIL"] = ""
weight = gristmill.to_device(host, "cuda:0")
x = DeviceArray.from_numpy(fake_driver.random_x(9, 136), "cuda:0")
os.environ["STUB_FAIL"] = "cuLaunchKernel=700"
raised(gristmill.linear, x, weight)
os.environ["STUB_FAIL"] = ""
reading, writing = os.pipe()
child = os.fork()
if not child:
    raised(gristmill.linear, x, weight)
    os.write(writing, messages["ForkedProcessError"][0].encode())
    os._exit(0)
os.waitpid(child, 0)
messages["ForkedProcessError"] = [os.read(reading, 65536).decode()]
with open(os.environ["MESSAGES"], "w") as file:
    json.dump(messages, file)
"""


@pytest.fixture(scope="module")
def at_the_stub(tmp_path_factory) -> dict[str, list[str]]:
    """Class -> messages that the CUDA driver's module raises."""
    folder = tmp_path_factory.mktemp("stub")
    library = stub_driver.build(stub_driver.TESTS / "stub_cuda/stub_cuda.c", folder / "libcuda.so.1")
    fake_driver.usual_pack(folder / "packs", "sm90", stub_driver.code_of)
    quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning", "OPENBLAS_NUM_THREADS": "1"}
    program = textwrap.dedent(AT_THE_STUB)
    stub_driver.run(library, folder, program, MESSAGES=str(folder / "messages.json"), **quiet)
    return json.loads((folder / "messages.json").read_text())


def test_every_class_that_can_be_raised_is_raised_here():
    assert MISTAKES.keys() == classes().keys() - BASES


@pytest.mark.parametrize("name", MISTAKES)
def test_messages_are_as_the_page_says(name, tmp_path, at_the_stub):
    """Each mistake raises its class and no other, in a form of the page, and each form of the page is raised."""
    messages = list(at_the_stub.get(name, []))
    for number, mistake in enumerate(MISTAKES[name]):
        with pytest.MonkeyPatch.context() as patch:
            messages.append(message_of(mistake, classes()[name], tmp_path / str(number), patch))
    assert messages
    for message in messages:
        assert [form for form in forms(name) if matches(form, message)], f"not on the page: {message}"
    for form in forms(name):
        assert [message for message in messages if matches(form, message)], f"not raised: {form}\nbut {messages}"


def message_of(mistake, expected: type[GristmillError], folder: Path, patch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    patch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    patch.setenv("GRISTMILL_PACK_PATH", str(folder / "packs"))
    driver = fake_driver.FakeDriver("cuda", ("sm90", "sm90"))
    patch.setitem(drivers._drivers, "cuda", driver)
    try:
        with pytest.raises(expected) as caught:
            mistake(Machine(folder, patch, driver))
    finally:
        forget_loaders()
    assert caught.type is expected
    return str(caught.value)


def test_commands_put_it_as_the_page_says(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    assert main(["why", "--arch", "sm80", "--M", "1", "--N", "8", "--K", "8", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"].keys() == {"class", "message"}
    assert err.startswith("gristmill why: NoPackError: no pack for sm80 is installed")
    with pytest.raises(SystemExit) as stopped:
        main(["why", "--no-such-option"])
    assert stopped.value.code == 2
