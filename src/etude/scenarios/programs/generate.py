"""Rows of right and wrong programs, made from a seed, with labels that were tried out."""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.errors import EtudeError
from etude.core.keys import generator
from etude.scenarios.programs import on_lists, on_numbers, on_structures, on_texts
from etude.scenarios.programs.problem import Family, Problem
from etude.scenarios.sandbox.check import CheckResult, check_program
from etude.scenarios.sandbox.limits import Limits

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
}
_FUNCTIONS = {"min": "max", "max": "min"}
_NOTHING = ast.Pass()
"""Stands for a statement that is left out."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed program."""

    source: str
    change: str
    """The change in words: the line before and after."""


def mutants(source: str, random: random.Random) -> Iterator[Mutant]:
    """All programs with one change, each once, in a random order."""
    tree = ast.parse(source)
    # As `ast.unparse` writes it, so that the lines can be compared.
    before = ast.unparse(tree) + "\n"
    changes = [
        (type(node).__name__, index, number)
        for index, node in enumerate(ast.walk(tree))
        for number in range(len(_changed(node, tree)))
    ]
    random.shuffle(changes)
    seen = {before}
    for _, index, number in _mixed(changes):
        mutated = copy.deepcopy(tree)
        node = next(node for place, node in enumerate(ast.walk(mutated)) if place == index)
        _replace(mutated, node, _changed(node, mutated)[number])
        after = ast.unparse(ast.fix_missing_locations(mutated)) + "\n"
        if after not in seen and not _gives_itself_away(mutated):
            seen.add(after)
            yield Mutant(after, _describe(before, after))


def _mixed(changes: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """One of each kind, then the next of each: some kinds have many more places than others."""
    rank: dict[str, int] = {}
    ranked = []
    for change in changes:
        rank[change[0]] = rank.get(change[0], -1) + 1
        ranked.append((rank[change[0]], change))
    return [change for _, change in sorted(ranked, key=lambda item: item[0])]


def _changed(node: ast.AST, tree: ast.AST) -> list[ast.AST]:
    """The nodes that could replace a node."""
    match node:
        case ast.Compare(ops=ops):
            return [
                ast.Compare(node.left, [*ops[:index], other(), *ops[index + 1 :]], node.comparators)
                for index, op in enumerate(ops)
                for other in _COMPARISONS.get(type(op), ())
            ]
        case ast.BinOp(left=left, op=op, right=right):
            return [ast.BinOp(left, other(), right) for other in _OPERATORS.get(type(op), ())]
        case ast.AugAssign(target=target, op=op, value=value):
            changed: list[ast.AST] = [
                ast.AugAssign(target, other(), value) for other in _OPERATORS.get(type(op), ())
            ]
            return [*changed, ast.Assign([target], value), ast.Pass()]
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            return [ast.BoolOp(other, values), *values]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [operand]
        case ast.Constant(value=bool()):
            return [ast.Constant(not node.value)]
        case ast.Constant(value=int(number)):
            return [ast.Constant(number + 1), *([ast.Constant(number - 1)] if number > 0 else [])]
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return [ast.Call(ast.Name(_FUNCTIONS[name], ast.Load()), args, node.keywords)]
        case ast.Assign(targets=[ast.Name()]) if _is_in_loop(node, tree):
            return [_NOTHING]
        case ast.Name(ctx=ast.Load()):
            return [ast.Name(name, ast.Load()) for name in _locals(tree) if name != node.id]
    return []


def _gives_itself_away(tree: ast.AST) -> bool:
    """Whether nobody would write it: a lone `pass`, a number plus 0, something compared with itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Pass() | ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=0)):
                return True
            case ast.Compare(left=left, comparators=[right]) | ast.BinOp(left=left, right=right):
                if ast.dump(left) == ast.dump(right):
                    return True
    return False


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                without = [item for item in value if item is not old]
                changed = [new if item is old else item for item in value]
                setattr(parent, field, without if new is _NOTHING and without else changed)
                return


def _is_in_loop(node: ast.AST, tree: ast.AST) -> bool:
    loops = (loop for loop in ast.walk(tree) if isinstance(loop, ast.For | ast.While))
    return any(inner is node for loop in loops for inner in ast.walk(loop))


def _locals(tree: ast.AST) -> list[str]:
    """Names that the program assigns to, its parameters among them."""
    stored = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return sorted(stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)})


def _describe(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    index = next(index for index, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    if len(new) < len(old):
        return f"line {index + 1}: `{old[index].strip()}` was left out"
    return f"line {index + 1}: `{old[index].strip()}` became `{new[index].strip()}`"


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

    async def make(index: int, problem: Problem) -> Row:
        async with slots:
            return await _row(index, problem, seed)

    return await asyncio.gather(
        *(make(index, problem) for index, problem in enumerate(_problems(count, seed)))
    )


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


async def _row(index: int, problem: Problem, seed: int) -> Row:
    right = await check_program(problem.solution, problem.tests, limits=_LIMITS)
    if right.status != "ok":
        raise EtudeError(
            f"the right program of {problem.family} is {right.status}: {right.reason}\n{problem.solution}"
        )
    attempts, mutant, wrong = await _plant(problem, list(_mutants(problem, seed, index)))
    of_test = generator(seed, "split", index).random() < TEST_SHARE
    return {
        "apps_split": "test" if of_test else "train",
        "apps_problem_id": index,
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


def _mutants(problem: Problem, seed: int, index: int) -> list[Mutant]:
    candidates = mutants(problem.solution, generator(seed, "mutants", index))
    return [mutant for _, mutant in zip(range(_MUTANTS_PER_PROBLEM), candidates, strict=False)]


async def _plant(problem: Problem, candidates: Sequence[Mutant]) -> tuple[int, Mutant, CheckResult]:
    """The first that is wrong without giving itself away, and how many were tried."""
    for attempts, mutant in enumerate(candidates, 1):
        result = await check_program(mutant.source, problem.tests, limits=_LIMITS)
        if result.status == "wrong" and result.passed and not result.errors:
            return attempts, mutant, result
    raise EtudeError(f"no mutation of {problem.family} is wrong on some tests only:\n{problem.solution}")
