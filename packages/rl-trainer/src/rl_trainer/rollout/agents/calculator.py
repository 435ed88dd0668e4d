"""A calculator tool; expressions are parsed, never executed as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

import msgspec

from rl_trainer.rewards.arithmetic import BINARY, evaluate


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
    """Arguments of the calculator."""

    expression: str


class Calculator:
    """The value of an expression of numbers, `+ - * / // %` and parentheses.

    Exact, and a decimal where it is no integer.

    >>> Calculator().call(Expression("(384 + 1) * 592 / 4")), Calculator().call(Expression("1/8"))
    ('56980', '0.125')
    """

    name = "calculator"
    description = "Evaluates an arithmetic expression of numbers, + - * / // % and brackets."
    arguments = Expression

    def call(self, arguments: Expression) -> str:
        """The value as text.

        Raises:
            ValueError: the expression is invalid, or longer than 200 characters.
            ArithmeticError: it divides by 0.
        """
        value = evaluate(arguments.expression, _OPERATORS, lambda number: Fraction(str(number)))
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
