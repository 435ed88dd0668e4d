"""The value of an arithmetic expression: it is parsed, and nothing is run as code."""

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
"""Characters of an expression; without powers they bound the size of every number on the way."""


def evaluate(
    text: str, operators: Mapping[type[ast.AST], Callable[..., Fraction]], number: Callable[[int | float], Fraction]
) -> Fraction:
    """The exact value of `text`: numbers, brackets and these operators, of one or two sides.

    Args:
        text: the expression.
        operators: by node of `ast`.
        number: is asked the value of each number that occurs.

    Raises:
        ValueError: it is no such expression, or longer than LONGEST.
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
