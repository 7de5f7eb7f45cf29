"""The formula language as a whitelist of Python's syntax tree: a second reading of it, for tests of the first."""

from __future__ import annotations

import ast
import re
import warnings

FUNCTIONS = ("ceil_div", "min", "max")
NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip

# "2x", "1.5", "0x10": Python takes some of these, with a warning; none is a number of the language.
ODD_NUMBER = re.compile(r"\b\d\w*[A-Za-z_.]")


def names_in(text: str) -> frozenset[str] | None:
    """The names that the formula `text` has; None where it is no formula."""
    if len(text) > 400 or ODD_NUMBER.search(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval")
            compile(tree, "<formula>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            fits = not node.keywords and len(node.args) == 2
        elif isinstance(node, ast.Name):
            fits = (node.id in FUNCTIONS) == (id(node) in functions)
            names.add(node.id)
        elif isinstance(node, ast.Constant):
            fits = type(node.value) is int and abs(node.value) <= 2**63
        else:
            fits = isinstance(node, NODES) and id(node) not in functions
        if not fits:
            return None
    return frozenset(names - set(FUNCTIONS))
