"""Rows of right and wrong programs, made from a seed, with labels that were tried out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from etude.core.errors import EtudeError
from etude.core.keys import generator
from etude.scenarios.programs import on_lists, on_numbers, on_structures, on_texts
from etude.scenarios.programs.mutate import Mutant, mutants
from etude.scenarios.programs.problem import Family, Problem
from etude.scenarios.sandbox.check import CheckResult, check_program
from etude.scenarios.sandbox.limits import Limits

FAMILIES: tuple[Family, ...] = (
    *on_numbers.FAMILIES,
    *on_lists.FAMILIES,
    *on_structures.FAMILIES,
    *on_texts.FAMILIES,
)

TEST_SHARE = 0.25
"""The share of the rows whose `apps_split` is `test`."""

_DRAWS_PER_ROW = 50
_MUTANTS_PER_PROBLEM = 80
_LIMITS = Limits(wall_seconds=2.0, cpu_seconds=2)

Row = dict[str, Any]
"""A row with the columns of `lrhammond/buggy-apps`, and APPS's `problem_id` and `input_output`."""


async def generate_rows(count: int, seed: int, *, max_concurrency: int = 2) -> list[Row]:
    """`count` problems, each with a right program and one with a planted bug.

    The right program passes all of its tests in the sandbox. The wrong one runs without an error, passes
    some tests and gives something else on others. The same seed gives the same rows.

    Raises EtudeError when a right program fails its tests, or a problem has no fitting mutation.
    """
    slots = asyncio.Semaphore(max_concurrency)

    async def make(place: int, problem: Problem) -> Row:
        async with slots:
            return await _row(place, problem, seed)

    return await asyncio.gather(*(make(place, one) for place, one in enumerate(_problems(count, seed))))


def _problems(count: int, seed: int) -> list[Problem]:
    """Different problems, in turn from all families."""
    problems: dict[str, Problem] = {}
    for draw in range(count * _DRAWS_PER_ROW):
        family = FAMILIES[draw % len(FAMILIES)]
        problem = family(generator(seed, "problem", draw))
        # By the program too: where only the examples differ, it is the same problem.
        problems.setdefault(f"{_task(problem)}\n{problem.solution}", problem)
        if len(problems) == count:
            return list(problems.values())
    raise EtudeError(f"there are no {count} different problems; {len(problems)} were found")


def _task(problem: Problem) -> str:
    return problem.question.partition("\n\nFor example:")[0]


async def _row(place: int, problem: Problem, seed: int) -> Row:
    right = await check_program(problem.solution, problem.tests, limits=_LIMITS)
    if right.status != "ok":
        raise EtudeError(
            f"the right program of {problem.family} is {right.status}: {right.reason}\n{problem.solution}"
        )
    attempts, mutant, wrong = await _plant(problem, list(_mutants(problem, seed, place)))
    of_test = generator(seed, "split", place).random() < TEST_SHARE
    return {
        "apps_split": "test" if of_test else "train",
        "apps_problem_id": place,
        "difficulty": "introductory",
        "question": problem.question,
        "solutions": [{"apps_solution_number": 0, "solution": problem.solution}],
        "buggy_solutions": [
            {
                "apps_solution_number": 0,
                "solution": mutant.source,
                "bug": mutant.change,
                "checks": {"pass": wrong.passed, "fail": wrong.failed, "error": wrong.errors},
                "generation_attempts": attempts,
            }
        ],
        "flags": "",
        "family": problem.family,
        "input_output": json.dumps(problem.tests.to_json()),
    }


def _mutants(problem: Problem, seed: int, place: int) -> list[Mutant]:
    found = mutants(problem.solution, generator(seed, "mutants", place))
    return [mutant for _, mutant in zip(range(_MUTANTS_PER_PROBLEM), found, strict=False)]


async def _plant(problem: Problem, candidates: Sequence[Mutant]) -> tuple[int, Mutant, CheckResult]:
    """The first that is wrong without giving itself away, and how many were tried."""
    for attempts, mutant in enumerate(candidates, 1):
        result = await check_program(mutant.source, problem.tests, limits=_LIMITS)
        if result.status == "wrong" and result.passed and not result.errors:
            return attempts, mutant, result
    raise EtudeError(f"no mutation of {problem.family} is wrong on some tests only:\n{problem.solution}")
