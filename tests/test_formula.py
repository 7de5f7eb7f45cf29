import itertools

import pytest
from formula_by_ast import names_in
from gristmill.errors import FormulaError
from gristmill.formula import MAX_DEPTH, MAX_LENGTH, Formula


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
    pytest.fail(f"{formula.text} was taken")


@pytest.mark.parametrize("nested", ["({})", "-{}", "not {}", "-({})", "min(M, {})", "M + ({})"])
def test_formula_as_deep_as_may_be_is_evaluated_and_a_deeper_one_is_refused(nested):
    """None that is taken is too deep for Python's compiler."""
    texts = ["M"]
    while len(texts[-1]) <= MAX_LENGTH:
        texts.append(nested.format(texts[-1]))
    taken = [text for text in texts if is_taken(text)]
    assert taken == texts[: len(taken)]
    assert min(MAX_DEPTH, len(texts) - 2) < len(taken) <= MAX_DEPTH + 1
    for text in taken:
        assert isinstance(Formula(text)({"M": 3}), int)


def is_taken(text: str) -> bool:
    try:
        Formula(text)
    except FormulaError:
        return False
    return True


def test_every_short_row_of_tokens_is_read_as_python_reads_it():
    """Up to five tokens: the same ones are formulas, with the same names; but for a comma before a bracket's end."""
    kinds = ("M", "7", "-", "*", "<=", "not", "and", "min", "(", ")", ",")
    rows = [row for length in range(1, 5) for row in itertools.product(kinds, repeat=length)]
    rows += [("min", "(", *row) for row in itertools.product(kinds, repeat=4)]
    for row in rows:
        text = " ".join(row)
        expected = names_in(text)
        if ", )" in text:
            assert not is_taken(text)
        elif expected is None:
            assert not is_taken(text), text
        else:
            assert Formula(text).names == expected


def test_nothing_is_compiled_before_it_is_evaluated():
    formula = Formula("M + 1")
    assert formula._code is None
    assert formula({"M": 1}) == 2
    assert formula._code is not None


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
