import pytest
from gristmill.device import NOMINAL_DEVICES, nominal_device
from gristmill.errors import NoDeviceError, NoKernelError
from gristmill.manifest import Manifest
from gristmill.problem import Problem
from gristmill.select import select, verdicts
from sample_pack import dump, entry, manifest

PROBLEM = Problem("w4a16_gemm", 65, 128, 256, 64, "float16", False, False, 16)
DEVICE = nominal_device("gfx1151")


def parse(*entries, policy=None):
    policy = policy or [{"when": "1", "entries": [row["name"] for row in entries], "origin": "table"}]
    return Manifest.parse(dump(manifest(entries=list(entries), policy=policy)))


def test_select_gives_the_launch():
    selection = select(PROBLEM, DEVICE, parse(entry()))
    assert selection.entry.name == entry()["name"]
    assert selection.grid == (2 * 2, 1, 1)
    assert selection.dynamic_shared_bytes == 2 * 64 * 256
    assert selection.is_floor


def test_first_rule_that_holds_wins_and_carries_its_origin():
    rules = [
        {"when": "M <= 16", "entries": ["small"], "origin": "for small M"},
        {"when": "K == 256 and N == 128", "entries": ["exact"], "origin": "exact shape"},
        {"when": "1", "entries": ["floor"], "origin": "floor"},
    ]
    pack = parse(entry(name="small"), entry(name="exact"), entry(name="floor"), policy=rules)
    assert select(PROBLEM, DEVICE, pack).origin == "exact shape"
    assert not select(PROBLEM, DEVICE, pack).is_floor
    assert select(PROBLEM._replace(M=16), DEVICE, pack).entry.name == "small"
    assert select(PROBLEM._replace(K=512), DEVICE, pack).is_floor


def test_rule_falls_through_to_the_first_entry_whose_needs_hold():
    strict = entry(
        name="strict", needs={"dtype": "float16", "zero_points": False, "conditions": ["group_size % 128 == 0"]}
    )
    pack = parse(strict, entry(name="lenient"))
    assert select(PROBLEM, DEVICE, pack).entry.name == "lenient"
    assert select(PROBLEM._replace(group_size=128), DEVICE, pack).entry.name == "strict"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PROBLEM._replace(dtype="bfloat16"), "needs float16, got bfloat16"),
        (PROBLEM._replace(has_zero_points=True), "takes no zero points"),
        (PROBLEM._replace(group_size=24), "needs group_size % 32 == 0 or group_size >= K, got K=256, group_size=24"),
        (PROBLEM._replace(alignment=2), "needs alignment % 16 == 0, got alignment=2"),
        (PROBLEM._replace(K=1024), "needs 131072 bytes of shared memory, the device has 65536"),
        (PROBLEM._replace(M=2**31 - 1, N=2**31 - 1), "needs a grid of"),
    ],
)
def test_refusal_says_what_was_needed_and_found(problem, reason):
    with pytest.raises(NoKernelError, match="no w4a16_gemm kernel for M="):
        select(problem, DEVICE, parse(entry()))
    (verdict,) = verdicts(problem, DEVICE, parse(entry()))
    assert any(found.startswith(reason) for found in verdict.reasons)


@pytest.mark.parametrize("name", ["M", "K"])
def test_size_that_an_int32_argument_cannot_hold_is_a_reason(name):
    row = entry(grid=["1", "1", "1"], dynamic_shared_bytes="0", arguments=[["x", "pointer"], [name, "int32"]])
    problem = PROBLEM._replace(**{name: 2**31 - 1})
    assert select(problem, DEVICE, parse(row)).entry.name == row["name"]
    with pytest.raises(NoKernelError, match=f"takes {name} in 32 bits, got 2147483648"):
        select(problem._replace(**{name: 2**31}), DEVICE, parse(row))


def test_damaged_entry_of_another_dtype_is_one_of_the_reasons():
    wrong = entry(name="wrong", needs={"dtype": "bfloat16", "zero_points": False, "conditions": []}, roundings="two")
    pack = Manifest.open(dump(manifest(entries=[entry(), wrong], policy=[])))
    with pytest.raises(NoKernelError, match=r"  wrong: .*entries\[1\] \(wrong\) roundings: must be an integer"):
        select(PROBLEM, DEVICE, pack)


def test_shared_memory_is_judged_by_the_devices_own_limit():
    pack = parse(entry())
    problem = PROBLEM._replace(K=1024)
    assert select(problem, DEVICE._replace(lds_bytes_per_block=131072), pack).dynamic_shared_bytes == 131072
    with pytest.raises(NoKernelError):
        select(problem, DEVICE._replace(lds_bytes_per_block=131071), pack)


def test_threads_are_judged_by_the_devices_own_limit():
    with pytest.raises(NoKernelError, match="needs 128 threads a block, the device has 64"):
        select(PROBLEM, DEVICE._replace(max_threads_per_block=64), parse(entry()))


def test_formula_that_fails_for_a_problem_is_a_reason_not_a_crash():
    pack = parse(entry(grid=["M // (K - 256)", "1", "1"]))
    with pytest.raises(NoKernelError, match="cannot be evaluated"):
        select(PROBLEM, DEVICE, pack)


def test_hip_counts_a_grid_in_threads():
    pack = parse(entry(dynamic_shared_bytes="0", grid=["M", "1", "1"]))
    problem = PROBLEM._replace(M=2**25)  # times 128 threads is 2**32
    with pytest.raises(NoKernelError, match="HIP's most is 4294967295 threads"):
        select(problem, DEVICE, pack)
    assert select(problem._replace(M=2**25 - 1), DEVICE, pack).grid == (2**25 - 1, 1, 1)
    assert select(problem, DEVICE._replace(backend="cuda"), pack).grid == (2**25, 1, 1)


def test_unknown_arch_is_refused_by_name():
    with pytest.raises(NoDeviceError, match="unknown arch 'gfx906'; known: gfx1151"):
        nominal_device("gfx906")
    assert set(NOMINAL_DEVICES) >= {"gfx1151", "gfx1201", "sm80", "sm90"}


def test_entry_whose_shared_memory_is_below_zero_is_not_launched():
    pack = parse(entry(name="odd", dynamic_shared_bytes="M - 1000"), entry(name="floor"))
    assert select(PROBLEM, DEVICE, pack).entry.name == "floor"
    assert verdicts(PROBLEM, DEVICE, pack)[0].reasons == ("its shared memory, M - 1000, is -935 bytes",)
