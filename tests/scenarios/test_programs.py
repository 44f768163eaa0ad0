"""Programs with and without a planted bug."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest

from etude.scenarios.programs.generate import FAMILIES, generate_rows, mutants
from etude.scenarios.programs.problem import Family
from etude.scenarios.sandbox.check import IoTests, check_program, same_value

SHIPPED = Path(__file__).parents[2] / "examples" / "code_validation" / "programs.jsonl"

BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@BY_NAME
def test_the_right_program_gives_what_was_worked_out_apart_from_it(family: Family):
    for seed in range(20):
        problem = family(random.Random(seed))
        namespace: dict[str, Any] = {}
        exec(problem.solution, namespace)
        function = namespace[str(problem.tests.function)]
        for given, expected in zip(problem.tests.inputs, problem.tests.outputs, strict=True):
            assert same_value(json.loads(json.dumps(function(*json.loads(json.dumps(given))))), expected)


@BY_NAME
def test_the_same_seed_draws_the_same_problem_and_others_draw_others(family: Family):
    assert family(random.Random(3)) == family(random.Random(3))
    assert len({family(random.Random(seed)).question for seed in range(30)}) > 3


@BY_NAME
def test_a_problem_says_what_it_wants_in_words_and_examples(family: Family):
    problem = family(random.Random(0))
    name, given = problem.tests.function, problem.tests.inputs[0]
    assert f"`{name}({', '.join(map(repr, given))})` is `{problem.tests.outputs[0]!r}`." in problem.question
    assert problem.question.startswith(f"Write a function `{name}(")
    assert "$" not in problem.question + problem.solution


@BY_NAME
def test_a_mutant_differs_from_its_program_in_one_line(family: Family):
    source = family(random.Random(1)).solution
    found = list(mutants(source, random.Random(0)))
    assert len({mutant.source for mutant in found}) == len(found) > 10
    for mutant in found:
        ast.parse(mutant.source)
        before, after = source.splitlines(), mutant.source.splitlines()
        if len(before) == len(after):
            assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
        else:
            assert len(before) == len(after) + 1 and "was left out" in mutant.change
        assert "pass" not in after


def test_mutants_come_in_the_order_of_the_seed():
    source = "def f(a, b):\n    return a < b and a + 1 == b\n"
    assert list(mutants(source, random.Random(5))) == list(mutants(source, random.Random(5)))
    changes = {mutant.change for mutant in mutants(source, random.Random(0))}
    line = "line 2: `return a < b and a + 1 == b`"
    assert {
        f"{line} became `return a <= b and a + 1 == b`",
        f"{line} became `return a < b or a + 1 == b`",
        f"{line} became `return a < b and a - 1 == b`",
        f"{line} became `return a < b and a + 2 == b`",
        f"{line} became `return a < b and b + 1 == b`",
        f"{line} became `return a < b`",
    } <= changes
    assert f"{line} became `return b < b and a + 1 == b`" not in changes


async def test_rows_follow_from_the_seed_and_their_labels_are_true():
    rows = await generate_rows(3, 7)
    assert rows == (await generate_rows(4, 7))[:3]
    assert rows != await generate_rows(3, 8)
    for row in rows:
        tests = IoTests.from_json(json.loads(row["input_output"]))
        (right,), (wrong,) = row["solutions"], row["buggy_solutions"]
        assert (await check_program(right["solution"], tests)).status == "ok"
        result = await check_program(wrong["solution"], tests)
        assert (result.status, result.passed > 0) == ("wrong", True)
        checks = {"pass": result.passed, "fail": result.failed, "error": result.errors}
        assert wrong["checks"] == checks


async def test_the_shipped_rows_are_the_generated_ones():
    lines = SHIPPED.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 180 and SHIPPED.stat().st_size < 300_000
    assert [row["apps_problem_id"] for row in rows] == list(range(180))
    assert {row["apps_split"] for row in rows} == {"train", "test"}
    assert {row["family"] for row in rows} == {family.__name__ for family in FAMILIES}
    # `ast.unparse` may write some programs otherwise in other versions of Python.
    assert [row["question"] for row in rows[:2]] == [row["question"] for row in await generate_rows(2, 0)]
    row = random.Random(0).choice(rows)
    tests = IoTests.from_json(json.loads(row["input_output"]))
    assert (await check_program(row["solutions"][0]["solution"], tests)).status == "ok"
    assert (await check_program(row["buggy_solutions"][0]["solution"], tests)).status == "wrong"
