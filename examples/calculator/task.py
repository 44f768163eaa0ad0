"""The task: sums in words, and a calculator that evaluates expressions safely."""

from __future__ import annotations

import ast
import operator
import random
from dataclasses import dataclass

SIGNS = {"plus": "+", "times": "*"}

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_LONGEST = 40
_LARGEST = 10**12


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of whole numbers with + - * and brackets.

    Args:
        expression: For example "12+30".
    """
    try:
        return str(_value(_parse(expression)))
    except (SyntaxError, ValueError) as error:
        return f"error: {error}"


def _parse(expression: object) -> ast.expr:
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ValueError(f"expected an expression of at most {_LONGEST} characters")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> int:
    """Walk the tree: whole numbers and three operations, nothing else has a value."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return _check_size(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _check_size(_OPERATIONS[type(sign)](_value(left), _value(right)))
    raise ValueError("only whole numbers, + - * and brackets")


def _check_size(number: int) -> int:
    if abs(number) > _LARGEST:
        raise ValueError("the number is too large")
    return number


@dataclass(frozen=True)
class Question:
    """A sum such as `What is 12 plus 30?`."""

    left: int
    word: str
    right: int

    @property
    def text(self) -> str:
        """The question in words."""
        return f"What is {self.left} {self.word} {self.right}?"

    @property
    def expression(self) -> str:
        """The text to type into the calculator."""
        return f"{self.left}{SIGNS[self.word]}{self.right}"

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right if self.word == "plus" else self.left * self.right)


def draw_questions(count: int, rng: random.Random) -> list[Question]:
    """`count` different questions about numbers of two digits, with answers of three."""
    questions: dict[Question, None] = {}
    while len(questions) < count:
        question = Question(rng.randint(10, 99), rng.choice([*SIGNS]), rng.randint(10, 99))
        if 100 <= int(question.answer) < 1000:
            questions[question] = None
    return list(questions)
