"""Integer expressions of launch plans: sizes and grids over dims, without torch or Triton.

    guard      := comparison ("and" comparison)*
    comparison := sum (("<=" | "<" | ">=" | ">" | "==") sum)?
    sum        := product (("+" | "-") product)*
    product    := atom (("*" | "//") atom)*
    atom       := integer | name | "(" sum ")" | ("cdiv" | "min" | "max") "(" sum "," sum ")"

Every value is a signed 64-bit integer; // rounds down, cdiv up; a divisor must be positive. A guard
is 1 or 0. tests/vectors/expressions.json holds what every evaluator must agree on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache

LIMIT = 2**63

_TOKENS = re.compile(r"(?: |[A-Za-z_][A-Za-z0-9_]*|[0-9]+(?![A-Za-z0-9_])|//|[-+*(),<>]|[<>=]=)*")

_SYMBOLS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.LtE: lambda a, b: a <= b,
    ast.Lt: lambda a, b: a < b,
    ast.GtE: lambda a, b: a >= b,
    ast.Gt: lambda a, b: a > b,
    ast.Eq: lambda a, b: a == b,
}
_CALLS: dict[str, Callable[[int, int], int]] = {
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}


class BadExpression(ValueError):
    """An expression that does not follow the grammar, or has no value for these names."""


def _bad(text: str, why: str) -> BadExpression:
    return BadExpression(f"expression {text!r}: {why}")


@cache
def _parse(text: str) -> ast.expr:
    if not _TOKENS.fullmatch(text):
        raise _bad(text, "it holds something that is no name, decimal number or operator")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _bad(text, "it does not parse") from error
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    for part in parts:
        if isinstance(part, ast.Compare):
            if len(part.ops) != 1 or type(part.ops[0]) not in _SYMBOLS:
                raise _bad(text, "one of <= < >= > == between two sums")
            _check_sum(text, part.left)
            _check_sum(text, part.comparators[0])
        else:
            _check_sum(text, part)
    return tree


def _check_sum(text: str, node: ast.expr) -> None:
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return
        case ast.Name():
            return
        case ast.BinOp(left=left, right=right) if type(node.op) in _SYMBOLS:
            inner = [left, right]
        case ast.Call(func=ast.Name(id=name), args=[_, _] as inner, keywords=[]) if name in _CALLS:
            pass
        case _:
            raise _bad(text, f"{ast.unparse(node)!r} is not part of the grammar")
    for part in inner:
        _check_sum(text, part)


def names(text: str) -> frozenset[str]:
    """The names an expression reads; BadExpression if it is malformed."""
    found = (n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name))
    return frozenset(found) - _CALLS.keys()


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The value of `text` with the names' `values`; BadExpression if it has none."""
    return _evaluate(text, _parse(text), values)


def _evaluate(text: str, node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            result = number
        case ast.Name(id=name):
            if name not in values:
                raise _bad(text, f"{name} has no value")
            result = values[name]
        case ast.BoolOp(values=parts):
            held = [_evaluate(text, part, values) for part in parts]
            return int(all(held))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            result = _apply(text, _SYMBOLS[type(op)], left, right, values)
        case ast.BinOp(left=left, op=op, right=right):
            divides = isinstance(op, ast.FloorDiv)
            result = _apply(text, _SYMBOLS[type(op)], left, right, values, divides)
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            result = _apply(text, _CALLS[name], left, right, values, name == "cdiv")
        case _:
            raise AssertionError(ast.dump(node))
    if not -LIMIT <= result < LIMIT:
        raise _bad(text, "a value leaves 64 bits")
    return int(result)


def _apply(
    text: str, what: Callable[[int, int], int], left: ast.expr, right: ast.expr,
    values: Mapping[str, int], divides: bool = False,
) -> int:  # fmt: skip
    a, b = _evaluate(text, left, values), _evaluate(text, right, values)
    if divides and b <= 0:
        raise _bad(text, f"divisor {b} is not positive")
    return what(a, b)
