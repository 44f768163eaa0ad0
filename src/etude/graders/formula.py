"""The formula of a `multi` grader: arithmetic over the scores of other graders, parsed and never evaluated
as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from etude.config.nearest import alternatives
from etude.core.errors import RequestError

_LONGEST = 2000
_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


class Formula:
    """`+ - * / ^`, brackets, numbers, names, and `min max abs floor ceil exp sqrt log`."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        """Raises RequestError for anything else, and for a name that is not one of `names`."""
        if len(text) > _LONGEST:
            raise RequestError(f"a formula has at most {_LONGEST} characters, found {len(text)}")
        try:
            self._tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
            self._check(self._tree, names)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise RequestError(f"the formula {text!r:.80} cannot be read: {error}") from error

    def value(self, scores: Mapping[str, float]) -> float:
        """The formula's value. Raises ArithmeticError or ValueError where it has none, as at 1 / 0."""
        return float(_value(self._tree, scores))

    def _check(self, node: ast.AST, names: Collection[str]) -> None:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                float(value)
            case ast.Name(id=name) if name in names:
                pass
            case ast.Name(id=name):
                known = alternatives(name, names, otherwise="there is none")
                raise RequestError(f"the formula names '{name}', which is no grader{known}")
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                self._check(node.left, names)
                self._check(node.right, names)
            case ast.UnaryOp(op=op) if type(op) in _OPERATORS:
                self._check(node.operand, names)
            case ast.Call(func=ast.Name(id=name), args=[_, *_], keywords=[]) if name in _FUNCTIONS:
                if name not in ("min", "max") and len(node.args) > 1:
                    raise RequestError(f"'{name}' in the formula takes one number, found {len(node.args)}")
                for argument in node.args:
                    self._check(argument, names)
            case _:
                raise RequestError(
                    f"the formula has {ast.unparse(node)!r:.80}; allowed are + - * / ^, brackets, numbers, "
                    f"names of graders, and {', '.join(_FUNCTIONS)}"
                )


def _value(node: Any, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name():
            return scores[node.id]
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, scores), _value(node.right, scores))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_value(node.operand, scores))
    numbers = [_value(argument, scores) for argument in node.args]
    is_spread = node.func.id in ("min", "max")
    return _FUNCTIONS[node.func.id](numbers) if is_spread else _FUNCTIONS[node.func.id](*numbers)
