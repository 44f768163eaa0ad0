"""A problem: what a function should do, a program that does it, and inputs to tell."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from textwrap import dedent
from typing import Any, TypeAlias

from etude.scenarios.sandbox.check import IoTests

_EXAMPLES = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with everything that is needed to tell right programs from wrong ones."""

    family: str
    question: str
    """The problem in words, with examples."""
    solution: str
    """A right program."""
    tests: IoTests
    """Their outputs come from a function that was written apart from the solution."""


Family: TypeAlias = Callable[[random.Random], Problem]
"""Draws a problem: the same generator gives the same one."""


def make_problem(
    function: str,
    parameters: str,
    task: str,
    body: str,
    oracle: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    values: Mapping[str, Any] | None = None,
) -> Problem:
    """A problem from its parts. `$names` in the task and the body stand for `values`.

    The solution is written the way `ast.unparse` writes it, and so is a program that is mutated: their
    looks tell nothing.
    """
    values = values or {}
    code = Template(dedent(body)).substitute(values).strip().replace("\n", "\n    ")
    tests = IoTests(
        tuple(list(arguments) for arguments in inputs),
        tuple(oracle(*arguments) for arguments in inputs),
        function,
    )
    description = Template(" ".join(dedent(task).split())).substitute(values)
    examples = [
        f"`{function}({', '.join(map(repr, arguments))})` is `{expected!r}`."
        for arguments, expected in list(zip(tests.inputs, tests.outputs, strict=True))[:_EXAMPLES]
    ]
    question = f"Write a function `{function}({parameters})` {description}\n\nFor example:\n" + "\n".join(
        examples
    )
    source = ast.unparse(ast.parse(f"def {function}({parameters}):\n    {code}\n")) + "\n"
    return Problem(function, question, source, tests)


def numbers(random: random.Random, most: int, low: int = -9, high: int = 9) -> list[int]:
    """Up to `most` whole numbers."""
    return [random.randint(low, high) for _ in range(random.randint(0, most))]


def word(random: random.Random, most: int, letters: str) -> str:
    """A text of up to `most` letters."""
    return "".join(random.choice(letters) for _ in range(random.randint(0, most)))
