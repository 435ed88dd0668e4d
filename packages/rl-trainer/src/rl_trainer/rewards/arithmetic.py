"""Evaluates arithmetic expressions by parsing them; nothing is run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

BINARY: Mapping[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
"""The four operations."""
LONGEST = 200
"""Largest number of characters; without powers, this bounds all intermediate results."""


def evaluate(
    text: str, operators: Mapping[type[ast.AST], Callable[..., Fraction]], number: Callable[[int | float], Fraction]
) -> Fraction:
    """The exact value of an expression of numbers, brackets and the given operators.

    Args:
        text: the expression.
        operators: by node class of `ast`.
        number: converts each number of the expression.

    Raises:
        ValueError: it is not such an expression, or longer than LONGEST.
        ArithmeticError: a division by 0.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as found) if not isinstance(found, bool):
                return number(found)
            case ast.BinOp(op=op) if type(op) in operators:
                return operators[type(op)](value(node.left), value(node.right))
            case ast.UnaryOp(op=op) if type(op) in operators:
                return operators[type(op)](value(node.operand))
            case _:
                raise ValueError(f"{type(node).__name__} is not arithmetic")

    if len(text) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters; got {len(text)}")
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"can't be read: {error.msg}") from error
