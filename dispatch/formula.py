"""The integer formulas of a manifest: grids, shared memory, needs and policy conditions.

A formula is one Python expression over named integers, for example ``ceil_div(M, 64) * ceil_div(N, 32)`` or
``group_size % 32 == 0 or group_size >= K``. It is checked against a whitelist of syntax before it is compiled, so a
manifest can neither name anything but numbers nor run for long.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache

from gristmill.errors import FormulaError

MAX_LENGTH = 400
MAX_CONSTANT = 2**63


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


FUNCTIONS = {"ceil_div": ceil_div, "min": min, "max": max}

# "2x", "1.5", "0x10": Python takes some of these, with a warning; none is a number of the language.
_ODD_NUMBER = re.compile(r"\b\d\w*[A-Za-z_.]")

_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_EXPRESSIONS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load)


class Formula:
    """A checked formula.

    Parameters
    ----------
    text : the expression; at most 400 characters

    Raises
    ------
    FormulaError : syntax outside the language
    """

    __slots__ = ("_code", "names", "text")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            found = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise FormulaError(f"a formula is a string of at most {MAX_LENGTH} characters, got {found}")
        self.text = text
        self.names, self._code = _compile(text)

    def __call__(self, values: Mapping[str, int]) -> int:
        """Evaluate with `values`; FormulaError when a name is missing or a divisor is zero."""
        try:
            return eval(self._code, _GLOBALS, values)
        except (NameError, ZeroDivisionError) as error:
            raise FormulaError(f"formula {self.text!r} cannot be evaluated: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Formula({self.text!r})"


_GLOBALS = {"__builtins__": {}, **FUNCTIONS}


@lru_cache(maxsize=4096)
def _compile(text: str):
    odd = _ODD_NUMBER.search(text)
    if odd:
        raise FormulaError(f"formula {text!r}: {odd.group()!r} is not an integer")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError(f"formula {text!r}: {error}") from None
    names = set()
    nodes = list(ast.walk(tree))
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if id(node) in functions:
            if not (isinstance(node, ast.Name) and node.id in FUNCTIONS):
                raise FormulaError(f"formula {text!r}: only {', '.join(FUNCTIONS)} can be called")
        elif isinstance(node, ast.Call):
            if node.keywords or len(node.args) != 2 or any(isinstance(a, ast.Starred) for a in node.args):
                raise FormulaError(f"formula {text!r}: a function takes two plain arguments")
        elif isinstance(node, ast.Name):
            if node.id in FUNCTIONS:
                raise FormulaError(f"formula {text!r}: {node.id} is a function")
            names.add(node.id)
        elif isinstance(node, ast.Constant):
            if type(node.value) is not int or abs(node.value) > MAX_CONSTANT:
                raise FormulaError(f"formula {text!r}: {node.value!r} is not an integer below 2**63")
        elif not isinstance(node, _EXPRESSIONS + _OPERATORS):
            raise FormulaError(f"formula {text!r}: {type(node).__name__} is not part of the language")
    try:
        return frozenset(names), compile(tree, "<formula>", "eval")
    except (RecursionError, MemoryError, ValueError) as error:
        raise FormulaError(f"formula {text!r}: {error}") from None
