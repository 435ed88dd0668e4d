"""A tool that does sums: its expressions are parsed, never run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

import msgspec

from rl_trainer.arithmetic import BINARY, evaluate


def _floor(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(a // b)


_OPERATORS: Mapping[type[ast.AST], Callable[..., Fraction]] = {
    **BINARY,
    ast.FloorDiv: _floor,
    ast.Mod: operator.mod,
    ast.USub: Fraction.__neg__,
    ast.UAdd: Fraction.__pos__,
}


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
        value = evaluate(arguments.expression, _OPERATORS, lambda number: Fraction(str(number)))
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
