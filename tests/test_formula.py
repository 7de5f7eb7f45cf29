import pytest
from gristmill.errors import FormulaError
from gristmill.formula import MAX_LENGTH, Formula


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("ceil_div(M, 64) * ceil_div(N, 32)", {"M": 65, "N": 32}, 2),
        ("2 * K * min(M, 16) + 512", {"K": 128, "M": 40}, 4608),
        ("group_size % 32 == 0 or group_size >= K", {"group_size": 40, "K": 40}, True),
        ("1 <= M <= 8 and not N % 8", {"M": 8, "N": 24}, True),
        ("1 <= M <= 8 and not N % 8", {"M": 9, "N": 24}, False),
        ("max(-K, 3) // 2", {"K": 7}, 1),
        ("ceil_div(M, 64)", {"M": 0}, 0),
        ("M * N * K", {"M": 2**31, "N": 2**31, "K": 2**31}, 2**93),
    ],
)
def test_formula_evaluates(text, values, expected):
    assert Formula(text)(values) == expected


def test_formula_knows_its_names():
    assert Formula("ceil_div(M, 64) + lds_bytes").names == {"M", "lds_bytes"}


@pytest.mark.parametrize(
    "text",
    [
        "", "M +", "M ** 99", "M << 3", "M if N else K", "[M]", "M.real", "M[0]", "lambda: 1", "'a'", "1.5", "True",
        "__import__('os')", "open(M)", "min", "min(M)", "min(M, N, K)", "min(*M, N)", "min(M, N, key=K)", "(x := 3)",
        "f'{M}'", "M is N", "M in N", "2 ** 63 * 2", str(2**64), "M / 2", "print(M, N)", "min(min, 1)", "\x00", None, 7,
        "M" + " + M" * MAX_LENGTH, "(" * 200 + "M" + ")" * 200, "-" * 399 + "M",
    ],
)  # fmt: skip
def test_formula_refuses_what_is_not_its_language(text):
    try:
        formula = Formula(text)
    except FormulaError:
        return
    # Deep nesting may be accepted where the parser copes with it: then it must be harmless.
    assert set(text) <= set("(-M)")
    assert formula({"M": 3}) in (3, -3)


@pytest.mark.parametrize("text", ["2if M else N", "1_000", "0x10", "3j", "1.", "7or M", "M + 5and N"])
@pytest.mark.filterwarnings("error")
def test_odd_number_is_refused_without_a_warning(text):
    with pytest.raises(FormulaError, match="is not an integer"):
        Formula(text)


@pytest.mark.parametrize(
    ("text", "values"), [("M // N", {"M": 1, "N": 0}), ("M % N", {"M": 1, "N": 0}), ("M + N", {"M": 1})]
)
def test_formula_that_cannot_be_evaluated_says_which(text, values):
    with pytest.raises(FormulaError, match=r"formula 'M .+ N' cannot be evaluated"):
        Formula(text)(values)
