"""Strict mode: each tripwire fires, nothing else does, and the main job runs with it where nothing can be compiled."""

import _posixsubprocess
import ast
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fake_driver
import gguf_files
import gristmill
import numpy as np
import pytest
import stub_driver
from gristmill import strict
from gristmill.drivers.default import first_device
from gristmill.errors import ArgumentError, NoDeviceError, StrictModeError
from gristmill.loader import loader_for

TESTS = Path(__file__).parent
HELPERS = ("fake_driver.py", "stub_compute.py", "strict_job.py")
# What the job needs beside the standard library. Neither triton nor torch, nor any of their friends.
PACKAGES = ("numpy", "numpy.libs", "ml_dtypes")

# What the runtime must never do, as a line of code, and the words of the error.
VIOLATIONS = {
    "triton": ("import triton", "the import of triton"),
    "triton, tried only": ("try:\n  import triton.language\nexcept ImportError: pass", "the import of triton"),
    "triton, by name": ("import importlib; importlib.import_module('triton')", "the import of triton"),
    "triton, probed": ("import importlib.util; importlib.util.find_spec('triton')", "the import of triton"),
    "aot": ("import gristmill.aot.nothing", r"the import of gristmill\.aot"),
    "kernels": ("import gristmill.kernels.nothing", r"the import of gristmill\.kernels"),
    "csrc": ("import gristmill.csrc.nothing", r"the import of gristmill\.csrc"),
    "subprocess": ("import subprocess; subprocess.Popen(['true'])", r"a child process \(subprocess\.Popen 't"),
    "system": ("import os; os.system('true')", r"a child process \(os\.system"),
    "fork": ("import os; os.fork() or os._exit(0)", r"a child process \(os\.fork"),
    "exec": ("import os; os.execv('/bin/true', ['true'])", r"a child process \(os\.exec"),
    "spawn": ("import os; os.posix_spawn('/bin/true', ['true'], {})", r"a child process \(os\.posix_spawn"),
    "multiprocessing": (
        "from multiprocessing.util import spawnv_passfds; spawnv_passfds(b'/bin/true', [b'true'], [])",
        r"a child process \(fork_exec \[b't",
    ),
    "socket": ("import socket; socket.socket()", r"a socket \(socket\.__new__ "),
    "host name": ("import socket; socket.getaddrinfo('localhost', 80)", r"a socket \(socket\.getaddrinfo 'loc"),
    "write": ("open(FOLDER + '/a', 'w')", "opening '.*/a' for writing"),
    "append": ("open(FOLDER + '/a', 'ab')", "opening '.*/a' for writing"),
    "update": ("open(FOLDER + '/there', 'r+')", "opening '.*/there' for writing"),
    "os.open": ("import os; os.open(FOLDER + '/a', os.O_CREAT)", "opening '.*/a' for writing"),
    "mkdir": ("import os; os.mkdir(FOLDER + '/a')", r"a change of the file system \(os\.mkdir '.*/a'\)"),
    "rename": ("import os; os.replace(FOLDER + '/there', FOLDER + '/b')", r".*\(os\.rename '"),
    "symlink": ("import os; os.symlink('there', FOLDER + '/b')", r".*\(os\.symlink 'there'"),
    "remove": ("import os; os.remove(FOLDER + '/there')", r".*\(os\.remove '"),
    "lock": ("import fcntl; fcntl.flock(open(FOLDER + '/there'), fcntl.LOCK_SH)", r".*\(fcntl\.flock "),
    "temporary": ("import tempfile; tempfile.mkdtemp(dir=FOLDER)", r".*\(tempfile\.mkdtemp "),
}  # fmt: skip


def function_of(module: str, lines: str, **names):
    """A function whose code is `lines`, as if it stood in `module`."""
    scope = {"__name__": module, **names}
    exec("def work():\n" + "".join(f"  {line}\n" for line in lines.split("\n")), scope)
    return scope["work"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "there").write_text("there")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """No violation on record, and triton not imported: what is imported already is not imported again."""
    strict.violations.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_each_tripwire_fires(kind, folder):
    lines, words = VIOLATIONS[kind]
    before = sorted(os.listdir(folder))
    work = function_of("gristmill.loader", lines, FOLDER=folder)
    with strict.enforced(), pytest.raises(StrictModeError, match=f"strict mode forbids ({words})") as caught:
        work()
    assert "beneath gristmill.loader:" in str(caught.value)
    assert list(strict.violations) == [str(caught.value)]
    assert sorted(os.listdir(folder)) == before
    assert (Path(folder) / "there").read_text() == "there"


def test_an_error_that_is_swallowed_is_on_record():
    work = function_of("gristmill.packs", "try:\n  import triton\nexcept Exception: pass", sys=sys)
    with strict.enforced():
        work()
    assert "the import of triton" in strict.violations[0]


def test_code_of_others_is_left_alone(folder):
    work = function_of("somebody.else", "open(FOLDER + '/a', 'w').close()\nimport socket; socket.socket().close()",
                       FOLDER=folder)  # fmt: skip
    with strict.enforced():
        work()
        with pytest.raises(StrictModeError):  # but not where Gristmill has called it
            function_of("gristmill.gemm", "called()", called=work)()
    work()
    assert len(strict.violations) == 1


def test_whole_process(folder):
    work = function_of("somebody.else", "open(FOLDER + '/a', 'w')", FOLDER=folder)
    with strict.enforced(whole_process=True):
        with pytest.raises(StrictModeError, match=r"beneath somebody\.else:\d+, in work"):
            work()
        with strict.enforced():
            work()
        with pytest.raises(StrictModeError):
            work()
    assert not strict.enabled()


def test_whole_process_names_who_imports():
    work = function_of("somebody.else", "import triton")
    with (
        strict.enforced(whole_process=True),
        pytest.raises(StrictModeError, match=r"beneath somebody\.else:2, in work"),
    ):
        work()


def test_it_leaves_nothing_on_the_path_of_imports():
    before = list(sys.meta_path)
    with strict.enforced(), strict.enforced(whole_process=True):
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before


def test_children_are_started_as_before_once_it_is_off():
    from multiprocessing.util import spawnv_passfds

    plain = _posixsubprocess.fork_exec
    with strict.enforced():
        kept = _posixsubprocess.fork_exec
        spawn(spawnv_passfds)  # somebody else's
    assert _posixsubprocess.fork_exec is plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_posixsubprocess, "fork_exec", kept)  # as who was imported meanwhile has it
        spawn(spawnv_passfds)
    assert not strict.violations


def spawn(start):
    assert os.waitpid(start(b"/bin/true", [b"true"], []), 0)[1] == 0


def test_reading_is_allowed(folder):
    lines = "open(FOLDER + '/there').read()\nopen(FOLDER + '/there', 'rb').read()\nimport json, tokenize"
    with strict.enforced():
        function_of("gristmill.packs", lines, FOLDER=folder)()
    assert not strict.violations


def test_torch_is_free_to_do_as_it_likes_while_it_is_imported(folder):
    initialise = function_of("torch", "open(FOLDER + '/a', 'w').close()", FOLDER=folder)
    initialise.__code__ = initialise.__code__.replace(co_name="<module>")
    with strict.enforced():
        function_of("gristmill.torch_adapter", "called()", called=initialise)()
    assert not strict.violations


@pytest.mark.parametrize("kind", ["triton, probed", "aot", "subprocess", "socket", "write", "mkdir"])
def test_what_torch_does_when_it_is_called_is_torchs_own(kind, folder):
    """As at the first use of a GPU, which torch prepares where a layer of ours is moved there."""
    lines, words = VIOLATIONS[kind]
    lines = f"try:\n  {lines}\nexcept ImportError: pass"
    by_torch = function_of("torch.cuda", lines, FOLDER=folder)
    by_others = function_of("torch.nn.modules.module", "called()", called=function_of("other", lines, FOLDER=folder))
    ours = function_of("gristmill.loader", lines, FOLDER=folder)
    ours_again = function_of("torch.nn.modules.module", "called()", called=ours)
    with strict.enforced():
        for called in (by_torch, by_others):
            function_of("gristmill.nn", "called()", called=called)()
            shutil.rmtree(folder + "/a", ignore_errors=True)
        assert not strict.violations
        with pytest.raises(StrictModeError, match=rf"forbids ({words}).* beneath gristmill\.loader:"):
            function_of("gristmill.nn", "called()", called=ours_again)()
    with strict.enforced(whole_process=True), pytest.raises(StrictModeError, match=rf"forbids ({words})"):
        by_torch()


def test_torch_is_asked_for_nothing_that_compiles():
    """What strict mode leaves to torch: no name in our sources is of a part of it that builds, fetches or writes."""
    building = {"compile", "_inductor", "_dynamo", "cpp_extension", "hub", "jit", "save", "package", "Generator"}
    allowed = {("fastcall.py", "_dynamo")}  # a function in C that allocates; what is around it is there already
    found = set()
    for path in Path(gristmill.__file__).parent.rglob("*.py"):
        if {"aot", "kernels", "csrc"} & set(path.parts[-3:]):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [name]
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                parts = name.split(".")
                found |= {(path.name, part) for part in parts[1:] if parts[0] == "torch" and part in building}
    assert found == allowed


def test_bytecode_is_not_written_while_it_is_on():
    former = sys.dont_write_bytecode
    with strict.enforced():
        assert sys.dont_write_bytecode
    assert sys.dont_write_bytecode == former


@pytest.mark.parametrize(("setting", "expected"), [("", "False False"), ("0", "False False"), ("1", "True False"),
                                                   ("process", "True True")])  # fmt: skip
def test_environment(setting, expected):
    program = (
        "import sys, gristmill; s = sys.modules.get('gristmill.strict'); "
        "print(bool(s and s._on), bool(s and s._whole_process))"
    )
    environment = {**os.environ, "GRISTMILL_STRICT": setting}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


def test_environment_with_a_value_that_means_nothing(monkeypatch):
    monkeypatch.setenv("GRISTMILL_STRICT", "yes")
    with pytest.raises(ArgumentError, match="GRISTMILL_STRICT must be 0, 1 or process, got 'yes'"):
        strict.enable_as_asked()


def test_command_that_would_build_is_refused():
    environment = {**os.environ, "GRISTMILL_STRICT": "1"}
    command = [sys.executable, "-m", "gristmill", "build", "--arch", "sm90"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("gristmill build: StrictModeError: strict mode forbids the import of gristmill.aot")


# The main job, in surroundings where nothing could be compiled, fetched or written.


@pytest.fixture(scope="module")
def world_readable():
    """A folder that every user may read; pytest's own are the user's alone."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def site(world_readable):
    """The packages of a deployment: the runtime as its wheel has it, numpy, and the reader of checkpoints."""
    site = world_readable / "site"
    site.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "aot", "kernels", "csrc")
    shutil.copytree(Path(gristmill.__file__).parent, site / "gristmill", ignore=ignored)
    for package in PACKAGES:
        for entry in map(Path, sys.path):
            if (entry / package).is_dir():
                (site / package).symlink_to(entry / package)
                break
    commands = site / "gristmill-0.dist-info"
    commands.mkdir()
    (commands / "entry_points.txt").write_text("[gristmill.commands]\ncheck = gristmill.commands.check\n")
    (commands / "METADATA").write_text("Name: gristmill\nVersion: 0\n")
    for helper in HELPERS:
        shutil.copy(TESTS / helper, site)
    return site


@pytest.fixture(scope="module")
def model(world_readable):
    """A checkpoint with a layer of each format; no file without the package that writes one."""
    path = world_readable / "model.gguf"
    if importlib.util.find_spec("gguf") is None:
        return path
    rng = np.random.default_rng(3)
    q = rng.integers(0, 16, (72, 256))
    scales, minimums = rng.uniform(0.01, 0.1, (72, 8)).astype(np.float16), rng.normal(size=(72, 8)).astype(np.float16)
    layers = {
        "blk.0.attn_q.weight": (gguf_files.blocks_q4_0(q, scales), "Q4_0"),
        "blk.0.attn_k.weight": (gguf_files.blocks_q4_1(q, scales, minimums), "Q4_1"),
    }
    return gguf_files.write(path, layers)


@pytest.fixture(scope="module")
def stub_library(world_readable):
    return stub_driver.build(stub_driver.TESTS / "stub_cuda/stub_cuda.c", world_readable / "libcuda.so.1")


def run_job(site, *arguments, sandboxed, **settings):
    job = [sys.executable, "-S", "-E", str(site / "strict_job.py"), str(site), *map(str, arguments)]
    if sandboxed:
        uid = str(random.randrange(100_000, 1_000_000))
        job = [sys.executable, str(TESTS / "sandbox.py"), uid, *job, "sandboxed"]
    environment = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", **settings}
    result = subprocess.run(job, env=environment, capture_output=True, text=True, cwd="/")
    if sandboxed and result.returncode == 77:
        pytest.skip(result.stderr.strip())
    return result


def passed(result) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def stub_settings(world_readable):
    packs = world_readable / "packs"
    if not packs.exists():
        fake_driver.usual_pack(packs, "sm90", stub_driver.code_of)
    return {"LD_LIBRARY_PATH": str(world_readable), "GRISTMILL_PACK_PATH": str(packs)}


@pytest.mark.parametrize("sandboxed", [False, True], ids=["open", "sandboxed"])
def test_main_job(world_readable, site, model, stub_library, sandboxed):
    settings = stub_settings(world_readable)
    output = passed(run_job(site, model, "cuda:0", "stub", sandboxed=sandboxed, **settings))
    assert "multiplied and compared" in output
    assert "checked the model" in output


@pytest.mark.parametrize("kind", [kind for kind in VIOLATIONS if kind not in ("aot", "kernels", "csrc")])
def test_main_job_with_a_runtime_that_breaks_its_promise(world_readable, site, model, stub_library, kind):
    """The job's own proof is worth something: with one line added to the loader it fails, and names that line."""
    lines, words = VIOLATIONS[kind]
    mutant = world_readable / "mutant"
    shutil.copytree(site, mutant, symlinks=True)
    try:
        loader = mutant / "gristmill" / "loader.py"
        target = "        ordinal = self.device.ordinal\n        module = self._modules.get"
        text = loader.read_text()
        assert target in text
        (mutant / "there").write_text("there")
        added = "".join(f"        {line}\n" for line in [f"FOLDER = {str(mutant)!r}", *lines.split("\n")])
        loader.write_text(text.replace(target, added + target))
        result = run_job(mutant, model, "cuda:0", "stub", sandboxed=False, **stub_settings(world_readable))
    finally:
        shutil.rmtree(mutant)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert re.match(rf"gristmill\.errors\.StrictModeError: strict mode forbids ({words})", last), result.stderr
    assert "beneath gristmill.loader:" in last


@pytest.mark.gpu
@pytest.mark.parametrize("sandboxed", [False, True], ids=["open", "sandboxed"])
def test_main_job_on_the_gpu(world_readable, site, model, sandboxed):
    try:
        device = first_device()
    except NoDeviceError as error:
        pytest.skip(str(error))
    packs = world_readable / "real packs"
    if not packs.exists():
        folder = loader_for(device).pack.folder
        shutil.copytree(folder, packs / Path(folder).name)
    settings = {"GRISTMILL_PACK_PATH": str(packs)}
    for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if name in os.environ:
            settings[name] = os.environ[name]
    output = passed(run_job(site, model, device, sandboxed=sandboxed, **settings))
    assert "multiplied and compared" in output


@pytest.mark.gpu
def test_torch_path_on_the_gpu():
    """The same through torch: module, op, compiled with a backend that compiles nothing, and a captured graph."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    program = f"""
import sys, torch
sys.path.append({str(TESTS)!r})
import fake_driver, gristmill
from gristmill import strict
strict.enable()
import gristmill.nn
host = fake_driver.random_weight(136, 576, 32, "bfloat16", zero_points=True, bias=True)
layer = gristmill.nn.W4A16Linear(host).to("cuda")
x = torch.randn(5, 576, dtype=torch.bfloat16, device="cuda")
with torch.inference_mode():
    expected = layer(x)
    assert torch.equal(torch.compile(layer, backend="eager")(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
assert not strict.violations, strict.violations
"""
    subprocess.run([sys.executable, "-c", program], check=True)
