"""A tool that does sums: its expressions are parsed, never run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

import msgspec

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_LONGEST = 200
"""Characters of an expression; without powers they bound the size of every number on the way."""


class Expression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the calculator takes."""

    expression: str


class Calculator:
    """The value of an expression of numbers, `+ - * / // %` and brackets: exact, and a decimal where it is no whole number.

    >>> Calculator().call(Expression("(384 + 1) * 592 / 4")), Calculator().call(Expression("1/8"))
    ('56980', '0.125')
    """

    name = "calculator"
    description = "Evaluates an arithmetic expression of numbers, + - * / // % and brackets."
    arguments = Expression

    def call(self, arguments: Expression) -> str:
        """The value as text.

        Raises:
            ValueError: it is no such expression, or longer than 200 characters.
            ArithmeticError: a division by 0.
        """
        if len(arguments.expression) > _LONGEST:
            raise ValueError(f"an expression may have {_LONGEST} characters; got {len(arguments.expression)}")
        try:
            tree = ast.parse(arguments.expression.strip(), mode="eval")
        except SyntaxError as error:
            raise ValueError(f"can't be read: {error.msg}") from error
        value = _value(tree.body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case _:
            raise ValueError(f"{type(node).__name__} is not arithmetic")
