"""The integer formulas of a manifest: grids, shared memory, needs and policy conditions.

A formula is one expression over named integers, for example ``ceil_div(M, 64) * ceil_div(N, 32)`` or
``group_size % 32 == 0 or group_size >= K``; docs/pack-format.md has the language. It is part of Python's, and is read
here token by token before Python sees it, so a manifest can neither name anything but numbers nor run for long. Python
compiles what has passed, when it is first evaluated: a process evaluates few of a pack's formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from keyword import iskeyword
from types import CodeType
from typing import Any

from gristmill.errors import FormulaError
from gristmill.ranges import larger, smaller

MAX_LENGTH = 400
MAX_DEPTH = 40  # brackets within brackets, and signs and `not` before one operand; Python's own limit is near 100
MAX_CONSTANT = 2**63


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"ceil_div": ceil_div, "min": smaller, "max": larger}

_GLOBALS = {"__builtins__": {}, **FUNCTIONS}

# A number with what is stuck to it ("1.5", "0x10", "2if") is one token, and then no number. Only spaces are skipped.
_TOKEN = re.compile(r"[0-9A-Za-z_.]+|//|[<>=!]=|[^ ]")

_JOINS = frozenset({"and", "or"})  # what stands after one, `not` included, is a formula of its own
_BETWEEN = frozenset({"+", "-", "*", "//", "%", "<", "<=", "==", "!=", ">", ">="}) | _JOINS


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
        self.names = _names(text)
        self._code: CodeType | None = None

    def __call__(self, values: Mapping[str, Any]) -> int:
        """Evaluate with `values`; FormulaError when a name is missing or a divisor is zero."""
        try:
            if self._code is None:
                self._code = compile(self.text, "<formula>", "eval", dont_inherit=True)
            return eval(self._code, _GLOBALS, values)
        except (NameError, ZeroDivisionError) as error:
            raise FormulaError(f"formula {self.text!r} cannot be evaluated: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Formula({self.text!r})"


def tokens(text: str) -> list[str]:
    """The numbers, names, operators and brackets of a formula, in order."""
    return _TOKEN.findall(text)


def _names(text: str) -> frozenset[str]:
    """The names in `text`; FormulaError unless it is a formula.

    A formula is operands with operators between them. So what may stand at a token follows from whether an operand has
    just ended there, from the brackets that are open, and from where `not` is allowed.
    """
    if text[:1] == " ":
        raise FormulaError(f"formula {text!r}: it starts with a space")
    names = set()
    commas: list[int] = []  # of each open bracket: how many commas are still to come before it may be closed
    function = ""  # the one whose bracket has to come next
    after_operand = False
    prefixes = 0  # signs and `not` since the last operand or bracket
    may_negate = True  # whether `not` may stand here
    for token in tokens(text):
        if after_operand:
            if token in _BETWEEN:
                after_operand = False
                may_negate = token in _JOINS
                prefixes = 0
            elif token == ")" and commas and commas[-1] == 0:
                commas.pop()
            elif token == "," and commas and commas[-1]:
                commas[-1] -= 1
                after_operand = False
                may_negate = True
                prefixes = 0
            else:
                raise _misplaced(text, token)
        elif token == "(":
            commas.append(1 if function else 0)
            function = ""
            may_negate = True
            prefixes = 0
            if len(commas) > MAX_DEPTH:
                raise FormulaError(f"formula {text!r}: more than {MAX_DEPTH} brackets within brackets")
        elif function:
            raise FormulaError(f"formula {text!r}: {function} is a function")
        elif token == "-" or (token == "not" and may_negate):
            may_negate = token == "not"
            prefixes += 1
            if prefixes > MAX_DEPTH:
                raise FormulaError(f"formula {text!r}: more than {MAX_DEPTH} signs before one operand")
        elif token in FUNCTIONS:
            function = token
        elif token[0] in "0123456789":
            if not token.isdecimal() or (token[0] == "0" and token != "0"):
                raise FormulaError(f"formula {text!r}: {token!r} is not an integer")
            if int(token) > MAX_CONSTANT:
                raise FormulaError(f"formula {text!r}: {token} is not an integer below 2**63")
            after_operand = True
        elif token.isascii() and token.isidentifier() and not iskeyword(token):
            names.add(token)
            after_operand = True
        else:
            raise _misplaced(text, token)
    if not after_operand or commas:
        raise FormulaError(f"formula {text!r}: something is missing at its end")
    return frozenset(names)


def _misplaced(text: str, token: str) -> FormulaError:
    if iskeyword(token) and token not in _JOINS and token != "not":
        return FormulaError(f"formula {text!r}: {token} is not part of the language")
    return FormulaError(f"formula {text!r}: {token!r} is not part of the language there")
