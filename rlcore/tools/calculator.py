"""A calculator as a tool: four functions, powers and brackets, no names."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from rlcore.tools.functions import function_tool

MAX_CHARACTERS = 200
MAX_DIGITS = 60

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@function_tool
def calculator(expression: Annotated[str, Field(description="such as 3 * (4 + 5)")]) -> str:
    """Evaluate an arithmetic expression exactly."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("not an arithmetic expression") from None
    value = _evaluate(tree.body)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("not an arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _small(Fraction(str(number)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(_BINARY[type(op)](_evaluate(left), _evaluate(right)))
        case _:
            raise ValueError("not an arithmetic expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_DIGITS:
        raise ValueError(f"exponents must be whole and at most {MAX_DIGITS}")
    # A Fraction to a whole power stays one.
    return _small(Fraction(base ** int(exponent)))


def _small(value: Fraction) -> Fraction:
    if max(len(str(abs(value.numerator))), len(str(value.denominator))) > MAX_DIGITS:
        raise ValueError(f"more than {MAX_DIGITS} digits")
    return value
