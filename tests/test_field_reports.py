"""Fifteen reports of users of other kernel libraries, each with what makes it impossible here.

One function a report, numbered; its docstring says what was reported and where. Together they are the claim that a
deployment of Gristmill fails early, loudly and with the fix, or not at all.
"""

import ast
import importlib.metadata
import json
import shutil
import textwrap
from pathlib import Path

import fake_driver
import gristmill
import pytest
import stub_driver
from gristmill import drivers, packs, strict
from gristmill.arrays import Device, DeviceArray
from gristmill.cli import main
from gristmill.device import NOMINAL_DEVICES, PACKS_FOR_ARCH, nominal_device
from gristmill.errors import (
    DamagedPackError,
    DriverError,
    GristmillError,
    NoDeviceError,
    NoDriverError,
    NoKernelError,
    NoPackError,
    NotLoadedError,
    PackError,
)
from gristmill.formula import Formula
from gristmill.loader import forget_loaders, loader_for
from gristmill.manifest import Manifest, Needs, Rule
from gristmill.packs import Pack, find_pack
from gristmill.preloading import preload
from gristmill.problem import DTYPES, OP_W4A16_GEMM, Problem
from gristmill.select import select
from gristmill.verified import Record, dump_records
from stub_driver import named

PACKAGE = Path(gristmill.__file__).parent
TESTS = Path(__file__).parent


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with fake devices behind "cuda", and nothing else; packs lie in `tmp_path / "packs"`."""
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    made = []

    def make(*archs):
        driver = fake_driver.FakeDriver("cuda", archs)
        monkeypatch.setitem(drivers._drivers, "cuda", driver)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.failing.clear()
    forget_loaders()


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory):
    return stub_driver.build(
        stub_driver.TESTS / "stub_cuda/stub_cuda.c", tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    )


def weight_on(device, K=128, dtype="float16"):
    """A weight on `device`, with nothing loaded for it."""
    host = fake_driver.random_weight(24, K, 32, dtype)
    return host.map(lambda array: DeviceArray.from_numpy(array, device))


def rows_on(device, M, K=128, dtype="float16"):
    return DeviceArray.from_numpy(fake_driver.random_x(M, K, dtype), device)


def command(capsys, *argv):
    code = main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_01_a_kernel_that_is_there_is_not_thereby_right(machine, tmp_path, capsys):
    """lemonade vllm-rocm 24, vLLM 46186: an int4 kernel compiled for gfx1151 ran fast and gave wrong numbers; a gate in
    Python was all that kept users from it.

    A kernel has a record of the run that proved it, bound to the very object; without it no wheel is made, and
    doctor and certificate say so; and the self-test finds a kernel that computes wrongly, on the user's own device."""
    from gristmill.aot.errors import WheelError
    from gristmill.aot.wheel import pack_wheel

    folder = fake_driver.usual_pack(tmp_path / "packs", "sm90")
    manifest = Pack.open(folder).manifest
    records = {name: Record(e.object, "NVIDIA H200", "silicon", 9, 0.5) for name, e in manifest.entries.items()}
    other = {name: Record("0" * 64, "NVIDIA H200", "silicon", 9, 0.5) for name in manifest.entries}
    (folder / "verified.json").write_bytes(dump_records(other))
    assert Pack.open(folder).verified() == {}  # the records of other objects prove nothing
    (folder / "verified.json").write_bytes(dump_records(records))
    assert Pack.open(folder).verified().keys() == manifest.entries.keys()
    (folder / "verified.json").unlink()
    with pytest.MonkeyPatch.context() as patch:  # these objects are no machine code; the record is what is looked for
        patch.setattr("gristmill.aot.wheel.check_pack", Pack.open)
        with pytest.raises(WheelError, match="12 entries have no record of having run"):
            pack_wheel(folder, tmp_path / "out", "license")

    driver = machine("sm90")
    _, answer = command(capsys, "doctor", "--kfd", tmp_path)
    assert "pack sm90: 12 of 12 entries have no record of a run that passed" in answer["mismatches"][0]
    code, answer = command(capsys, "selftest", "--device", "cuda:0", "--entry", "floor_float16")
    assert (code, list(answer["entries"])) == (0, ["floor_float16"])
    driver.computes = False  # the kernel runs, and what it leaves behind is not the product
    code, answer = command(capsys, "selftest", "--device", "cuda:0", "--entry", "floor_float16")
    assert (code, answer["passed"], list(answer["failed"])) == (1, False, ["floor_float16"])


def test_02_a_missing_image_is_an_error_at_the_call(machine, tmp_path):
    """AOTriton 210, PyTorch 194498, TheRock 7315: a load error was dropped, a null function launched; zeros came out,
    or an error that blamed a later op.

    There is no way to a launch without a loaded function. The call itself raises, with file and fix, and launches
    nothing; a driver that fails later in the way is named with call, symbol and arch."""
    folder = fake_driver.usual_pack(tmp_path / "packs", "sm90")
    driver = machine("sm90")
    weight, x, out = weight_on("cuda:0"), rows_on("cuda:0", 3), DeviceArray.empty("cuda:0", (3, 24), "float16")
    out.fill_bytes(0x77)
    hidden = [path.rename(path.with_suffix(".away")) for path in folder.glob("objects/*")]
    with pytest.raises(DamagedPackError, match=r"objects/\w{64}\.cubin: No such file .*; build the pack anew"):
        gristmill.linear(x, weight, out=out)
    for path in hidden:
        path.rename(path.with_suffix(".cubin"))
    for call in ("load_module", "function"):
        driver.failing = {call: f"{call} failed: the driver's words [symbol s, cuda:0 (sm90)]"}
        with pytest.raises(DriverError, match=f"{call} failed"):
            gristmill.linear(x, weight, out=out)
    driver.failing = {}
    assert not driver.called("launch")
    assert (out.to_numpy().view("uint16") == 0x7777).all()
    gristmill.linear(x, weight, out=out)
    assert len(driver.called("launch")) == 1


def test_03_a_device_without_its_pack_is_told_the_pip_line(machine, tmp_path, capsys):
    """TheRock 7839, rocm-systems 10685: the GPU was seen, and every op failed until the right device wheel was added; a
    leaf wheel lacked its parent, so that only some ops died.

    A pack is one folder that needs no other: alone it serves every op. Without it, call and doctor name the wheel."""
    driver = machine("sm89")
    with pytest.raises(NoPackError, match=r"no pack for sm89 is installed; run: pip install gristmill-sm80\."):
        gristmill.linear(rows_on("cuda:0", 3), weight_on("cuda:0"))
    code, answer = command(capsys, "doctor", "--kfd", tmp_path)
    assert (code, answer["fixes"]) == (1, ["pip install gristmill-sm80"])

    fake_driver.usual_pack(tmp_path / "packs", "sm80")  # nothing but this folder
    assert command(capsys, "doctor", "--kfd", tmp_path)[0] == 0
    for dtype in DTYPES:
        for M in (1, 4, 5, 300):
            gristmill.linear(rows_on("cuda:0", M, dtype=dtype), weight_on("cuda:0", dtype=dtype))
    assert len(driver.called("launch")) == 8


def test_04_selection_is_by_kernel_and_from_a_table(machine, tmp_path):
    """SGLang 38515 and 35526: the loader compared the compute capability with one number; sm_86 and sm_75 lacked some
    ops, which showed at TP=2 only and looked like a bug of graph capture.

    Which pack serves which arch is a table of exact names: 7.5 and 10.0 are refused, whatever is installed. And no
    op is lacking on a declared arch: the rows of each end with a kernel without conditions for every kind of weight."""
    from gristmill.aot.sources import read_rows

    for arch in ("sm80", "sm90", "gfx1151", "gfx1201"):
        fake_driver.usual_pack(tmp_path / "packs", arch)
    machine("sm75", "sm100", "sm86")
    for ordinal, arch in enumerate(("sm75", "sm100")):
        with pytest.raises(NoPackError, match=f"no pack is made for {arch}"):
            loader_for(Device("cuda", ordinal))
    assert loader_for(Device("cuda", 2)).pack.manifest.arch == "sm80"
    assert PACKS_FOR_ARCH.keys() == NOMINAL_DEVICES.keys()

    for arch in {pack for serving in PACKS_FOR_ARCH.values() for pack in serving}:
        rows = read_rows(arch)
        floor = rows.policy[-1]
        taken = {
            (row.op, row.dtype, row.zero_points)
            for row in rows.variants
            if row.name in floor.variants and not row.conditions
        }
        assert floor.when in ("1", "M >= 1")
        assert taken == {(OP_W4A16_GEMM, dtype, zeros) for dtype in DTYPES for zeros in (False, True)}, arch


def test_05_a_mismatch_is_called_by_its_name(tmp_path, stub_library):
    """SGLang 29317, torchao 2919 and 2908: a mismatch of libtorch's C++ ABI was reported as a missing arch, aborted the
    process, or left the slow paths to run.

    Nothing here links with libtorch, and without torch the same calls work; driver, device, arch and pack have error
    classes that are no subclasses of each other."""
    for library in PACKAGE.rglob("*.so"):
        content = library.read_bytes()
        assert not any(word in content for word in (b"libtorch", b"libc10", b"_ZN2at", b"_ZN3c10")), library
    requirements = importlib.metadata.requires("gristmill") or []
    assert not [line for line in requirements if line.startswith("torch") and "extra" not in line]
    classes = (NoDriverError, NoDeviceError, NoPackError, DamagedPackError, DriverError, NoKernelError)
    for one in classes:
        assert issubclass(one, GristmillError)
        assert [other for other in classes if issubclass(other, one)] == [one]

    fake_driver.usual_pack(tmp_path / "packs", "sm90", stub_driver.code_of)
    calls = stub_driver.run(
        stub_library,
        tmp_path,
        """
        sys.modules["torch"] = None  # whatever ails it
        weight = gristmill.to_device(fake_driver.random_weight(24, 128, 32), "cuda:0")
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(3, 128), "cuda:0"), weight)
        """,
    )
    assert len(named(calls, "cuLaunchKernel")) == 1


def test_06_no_value_of_an_argument_needs_another_kernel(machine, tmp_path, capsys):
    """vLLM 49349, 43009, 49903: the warm-up had missed specialisations: an integer is compiled anew when it is 1 or a
    multiple of 16, so kernels were compiled on live traffic.

    After one preload no M, no alignment and no shape loads anything more, let alone compiles; and what can be hit is
    known without a GPU, for every M."""
    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    driver = machine("sm90")
    weight = weight_on("cuda:0")
    preload(weight)
    loaded, loads = loader_for(Device("cuda", 0)).loaded(), len(driver.called("load_module"))
    driver.computes = False
    with strict.enforced():
        for M in (*range(1, 35), 127, 128, 129, 4096, 4097):
            for offset in (0, 1, 4, 8):
                x = DeviceArray.empty("cuda:0", (M * 128 + offset,), "float16").part(offset, (M, 128))
                gristmill.linear(x, weight)
    assert loader_for(Device("cuda", 0)).loaded() == loaded
    assert len(driver.called("load_module")) == loads
    launched = {call[1].partition(" ")[0] for call in driver.called("launch")}
    assert launched == {"symbol_small_float16", "symbol_tiled_float16", "symbol_floor_float16"}

    manifest, device = find_pack("sm90").manifest, nominal_device("sm90")
    for M in (*range(1, 600), 2**20, 2**31 - 1):
        for alignment in (2, 4, 8, 16):
            problem = Problem(OP_W4A16_GEMM, M, 24, 128, 32, "float16", False, False, alignment)
            assert select(problem, device, manifest).entry.name in loaded


def test_07_a_launch_under_capture_never_loads(machine, tmp_path):
    """vLLM 36587 and 55452: the first launch inside a capture called cuModuleLoadData: "operation not permitted when
    stream is capturing"; a workspace made on first use failed in the same way.

    Such a call raises before it touches the stream and names preload; after it the call under capture is a launch and
    nothing else: no load, no allocation, no copy."""
    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    driver = machine("sm90")
    weight, x, out = weight_on("cuda:0"), rows_on("cuda:0", 5), DeviceArray.empty("cuda:0", (5, 24), "float16")
    driver.capturing.add(7)
    driver.calls.clear()
    with pytest.raises(NotLoadedError, match=r"the stream is being captured; call gristmill\.preload\(weight\)"):
        gristmill.linear(x, weight, out=out, stream=7)
    assert driver.calls == []
    preload(weight)
    driver.calls.clear()
    gristmill.linear(x, weight, out=out, stream=7)
    assert [call[0] for call in driver.calls] == ["launch"]
    assert driver.called("launch")[0][5] == 7


def test_08_nothing_is_written(machine, tmp_path):
    """FlashInfer 2976, dynamo 11154: lock files and symlinks were written into site-packages; containers that are
    read-only, or run as another user, died.

    Load, call and unload leave package and pack as they were, and attempt no write. `test_strict` runs the same on a
    read-only file system with a uid that nobody has and no HOME."""

    def state():
        return {
            path: (path.lstat().st_mtime_ns, path.lstat().st_mode, path.lstat().st_size)
            for folder in (PACKAGE, tmp_path)
            for path in [folder, *folder.rglob("*")]
            if "__pycache__" not in path.parts and path != folder
        }

    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    machine("sm90")
    before = state()
    assert before
    strict.violations.clear()
    with strict.enforced(whole_process=True):
        weight = weight_on("cuda:0")
        preload(weight)
        gristmill.linear(rows_on("cuda:0", 3), weight)
        gristmill.unload()
    assert not strict.violations
    assert state() == before


def test_09_nothing_is_fetched():
    """FlashInfer 1352 and 2941, vLLM 38391: an ahead-of-time install still fetched headers and cubins at run time, so
    an air gap was a failure, and elsewhere starting took two minutes.

    The runtime has no code that could: none of its files imports a network module.
    `test_strict` runs it in a network namespace without an interface."""
    network = {"socket", "ssl", "http", "urllib", "ftplib", "requests", "asyncio", "socketserver", "xmlrpc", "pip"}
    files = [
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("aot", "kernels", "csrc")
    ]
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in imported} & network, path


def test_10_a_binary_never_meets_the_metadata_of_another(machine, tmp_path):
    """Triton 11512 and 4295, PyTorch 92664: ranks that shared a cache on NFS met EBUSY, missing files, or the binary of
    one rank with the shared-memory size of another.

    A manifest names its objects by their sha256, so whatever mixture of two builds lies on a disk, a launch takes the
    binary that its metadata was made for, or is refused. Processes that load side by side write nothing that they could
    quarrel over."""

    def build(root, code, shared):
        row = fake_driver.entry("only", code, dynamic_shared_bytes=Formula(shared))
        return fake_driver.write_pack(root, "sm90", [(row, code)], (Rule(Formula("1"), ("only",), "test"),))

    one, two = build(tmp_path / "packs", b"first build", "1000"), build(tmp_path / "other", b"second build", "2000")
    driver = machine("sm90")
    weight, x = weight_on("cuda:0"), rows_on("cuda:0", 3)
    first, second = next(one.glob("objects/*")), next(two.glob("objects/*"))
    original = first.read_bytes()
    first.write_bytes(second.read_bytes())  # the other rank's binary under this one's name
    with pytest.raises(DamagedPackError, match="the manifest says"):
        gristmill.linear(x, weight)
    first.write_bytes(original)
    shutil.copy(two / "manifest.json", one)  # the other rank's metadata beside this one's binary
    forget_loaders()
    with pytest.raises(DamagedPackError, match="No such file"):
        gristmill.linear(x, weight)
    assert not driver.called("launch")
    shutil.copy(second, one / "objects")  # both builds side by side
    forget_loaders()
    gristmill.linear(x, weight)
    (launch,) = driver.called("launch")
    assert driver.called("load_module") == [(0, b"second build")]
    assert launch[4] == 2000


def test_11_no_compiler_is_looked_for(machine, tmp_path, stub_library):
    """lemonade 2750, vLLM 2997, SGLang 1067: "Failed to find C compiler": a launcher was built with gcc in an image for
    run time.

    One launcher serves every argument layout that a manifest may name, as data. With an empty PATH and no triton the
    call works; `test_strict` does the same without any of it on the machine."""
    code = b"an object"
    layout = tuple(reversed(fake_driver.ARGUMENTS))
    row = fake_driver.entry("only", code, arguments=layout)
    fake_driver.write_pack(tmp_path / "reversed", "sm90", [(row, code)], (Rule(Formula("1"), ("only",), "test"),))
    driver = machine("sm90")
    driver.computes = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "reversed"))
        weight, x = weight_on("cuda:0"), rows_on("cuda:0", 3)
        out = gristmill.linear(x, weight)
    given = dict(zip([argument.name for argument in layout], driver.called("launch")[0][-1], strict=False))
    assert (given["x"], given["out"], given["M"], given["N"], given["K"]) == (x.address, out.address, 3, 24, 128)

    fake_driver.usual_pack(tmp_path / "packs", "sm90", stub_driver.code_of)
    calls = stub_driver.run(
        stub_library,
        tmp_path,
        """
        for name in ("triton", "ziglang", "ninja"):
            sys.modules[name] = None
        weight = gristmill.to_device(fake_driver.random_weight(24, 128, 32), "cuda:0")
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(3, 128), "cuda:0"), weight)
        """,
        PATH="/nonexistent",
        CC="/nonexistent/cc",
        GRISTMILL_STRICT="process",
    )
    assert len(named(calls, "cuLaunchKernel")) == 1


def test_12_dropped_coverage_does_not_go_unseen(tmp_path):
    """FlashInfer 4519, 3257, 4757, 3862: a limit on the size of an asset made an arch go, or head_dim 512, and their
    users were back at the JIT without a word.

    What the packs serve is a page that is checked in. A pack that serves less than it says makes no wheel: the build
    fails with the difference, and so it does for a wheel beyond its budget. No call of the page is left unserved."""
    from gristmill.aot.coverage import check_coverage, coverage_table
    from gristmill.aot.errors import WheelError
    from gristmill.aot.wheel import pack_wheel

    folder = fake_driver.usual_pack(tmp_path / "packs", "sm90")
    whole = Pack.open(folder).manifest
    page = tmp_path / "coverage.md"
    page.write_text(coverage_table([whole]))
    check_coverage([whole], page)
    dropped = {name: entry for name, entry in whole.entries.items() if not name.startswith("tiled")}
    signatures = {name: whole.signatures[name] for name in dropped}
    policy = tuple(rule._replace(entries=tuple(n for n in rule.entries if n in dropped)) for rule in whole.policy)
    with pytest.raises(WheelError, match=r"the packs do not cover what .*coverage.md says") as caught:
        check_coverage([whole._replace(entries=dropped, signatures=signatures, policy=policy)], page)
    assert "-| w4a16_gemm | float16 | no |" in str(caught.value)
    with pytest.raises(WheelError, match="the packs do not cover"):
        check_coverage([], page, whole=True)  # the arch went altogether

    records = {name: Record(e.object, "NVIDIA H200", "silicon", 9, 0.5) for name, e in whole.entries.items()}
    (folder / "verified.json").write_bytes(dump_records(records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gristmill.aot.wheel.check_pack", Pack.open)
        with pytest.raises(WheelError, match="budget"):
            pack_wheel(folder, tmp_path / "out", "license", budget_bytes=100)

    checked_in = (TESTS.parent / "docs" / "coverage.md").read_text()
    assert {f"## {arch}" for arch in PACKS_FOR_ARCH} <= set(checked_in.splitlines())
    rows = [line for line in checked_in.splitlines() if line.startswith(f"| {OP_W4A16_GEMM} |")]
    assert len(rows) >= len(PACKS_FOR_ARCH) * len(DTYPES) * 2
    assert not [row for row in rows if "NONE" in row]


def test_13_nothing_is_derived_from_a_version(machine, tmp_path):
    """bitsandbytes 2014 and 1799: ROCm 7.14 was computed as "8.4", a reported 7.1 as "8.0", and the binary for it was
    not found.

    The driver's version is for people to read: a call and the search for a pack never ask for it. A manifest's schema
    is one whole number."""
    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    driver = machine("sm90")

    def version():
        raise AssertionError("somebody asked for the driver's version")

    driver.version = version
    weight = weight_on("cuda:0")
    preload(weight)
    gristmill.linear(rows_on("cuda:0", 3), weight)
    assert len(driver.called("launch")) == 1
    asking = [path.name for path in PACKAGE.glob("*.py") if ".version()" in path.read_text()]
    assert asking == ["diagnosis.py"]
    manifest = tmp_path / "packs" / "sm90" / "manifest.json"
    for schema in (b"7.14", b'"1"', b"1.0", b"[7, 14]"):
        with pytest.raises(PackError, match="schema: must be an integer"):
            Manifest.parse(manifest.read_bytes().replace(b'"schema": 1', b'"schema": ' + schema))


def test_14_tensors_say_where_a_call_runs(tmp_path, stub_library):
    """Liger 1303, Triton 3729: with tensors on cuda:1 and device 0 current the wrong GPU was used; in a side thread
    with nothing to compile there was no context, and the launch failed.

    Here both at once: threads without a context, tensors on either device, and each launch reaches its own; what was
    current before is current again."""
    for arch in ("sm90", "sm80"):
        fake_driver.usual_pack(tmp_path / "packs", arch, stub_driver.code_of)
    calls = stub_driver.run(
        stub_library,
        tmp_path,
        textwrap.dedent(
            """
            import ctypes, threading
            library = ctypes.CDLL("libcuda.so.1")

            def current():
                context = ctypes.c_void_p()
                assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0
                return context.value

            host = fake_driver.random_weight(24, 128, 32)
            weights = [gristmill.to_device(host, f"cuda:{i}") for i in (0, 1)]
            inputs = [DeviceArray.from_numpy(fake_driver.random_x(3, 128), f"cuda:{i}") for i in (0, 1)]
            outs = [DeviceArray.empty(f"cuda:{i}", (3, 24), "float16") for i in (0, 1)]
            found = []

            def work():
                for i in (1, 0, 1):
                    found.append(current())
                    gristmill.linear(inputs[i], weights[i], out=outs[i])
                    found.append(current())

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert found == [None] * 6, found
            """
        ),
        STUB_DEVICES="9.0,8.9",
    )
    assert [details["device"] for details in named(calls, "cuLaunchKernel")] == ["1", "0", "1"]


def test_15_shared_memory_is_the_devices_own(machine, tmp_path, capsys):
    """vLLM 12498 and 36802, Triton 8182: a kernel needed 66,560 bytes of LDS where there were 65,536, or 131,072 where
    a consumer card has 101,376.

    What an entry needs is in the manifest and is held against the figure of the very device, before anything is
    loaded; what does not fit is passed over for one that does, and why says so."""

    def pack(arch, large):
        code = b"object"
        needs = Needs("float16", False, ())
        rows = [
            fake_driver.entry("large", code, needs=needs, dynamic_shared_bytes=Formula(str(large))),
            fake_driver.entry("floor", code, needs=needs, dynamic_shared_bytes=Formula("32768")),
        ]
        rules = tuple(Rule(Formula("1"), (row.name,), "test") for row in rows)
        fake_driver.write_pack(tmp_path / "packs", arch, [(row, code) for row in rows], rules)

    pack("sm80", 131072)
    pack("gfx1151", 66560)
    for arch, expected in (("sm80", "large"), ("sm86", "floor"), ("sm89", "floor"), ("gfx1151", "floor")):
        code, answer = command(capsys, "why", "--arch", arch, "--M", "5", "--N", "24", "--K", "128")
        assert (code, answer["entry"]) == (0, expected)
        if expected == "floor":
            assert "bytes of shared memory, the device has " in answer["rejected"]["large"]
    driver = machine("sm89")
    driver.facts[0] = nominal_device("sm89")
    gristmill.linear(rows_on("cuda:0", 5), weight_on("cuda:0"))
    assert [call[1].split()[0] for call in driver.called("launch")] == ["symbol_floor"]
    assert {call[3] for call in driver.called("function")} == {32768}  # nobody asked for what is not there


def test_each_report_has_its_test():
    numbers = sorted(int(name.split("_")[1]) for name in globals() if name.startswith("test_") and name[5].isdigit())
    assert numbers == list(range(1, 16))
