"""Wrong programs made from right ones by a model, which is a script here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.core.errors import EngineError, EtudeError, RequestError
from etude.scenarios.buggify import BuggifySettings, buggify
from etude.scenarios.datasets import BuggyAppsConfig, ProgramProblem, load_programs
from etude.scenarios.edits import comments, edit_distance, program_in, same_program
from etude.scenarios.sandbox.check import IoTests
from etude.store.journal import Journal
from tests.rewards.scripted_engine import ScriptedEngine, answering

RIGHT = """\
def biggest(values):
    best = values[0]
    for value in values:
        best = max(best, value)
    return best"""
TESTS = IoTests(([[1, 3, 2]], [[2, 1]], [[-1, -5]]), (3, 2, -1), "biggest")


def problem(name: str = "p", **fields: Any) -> ProgramProblem:
    values = {
        "where": "here:1",
        "question": "Biggest?",
        "right": (RIGHT,),
        "wrong": (),
        "difficulty": "interview",
    }
    return ProgramProblem(**{"id": name, **values, "split": "test", "tests": TESTS} | fields)


def written(program: str) -> str:
    return f"A slip in the start.\n\n```python\n{program}\n```"


SUBTLE = written(RIGHT.replace("values[0]", "0"))
NO_PROGRAM = "I would rather not."
UNCHANGED = written(RIGHT + "\n\n")
COMMENTED = written(RIGHT.replace("values[0]", "0  # wrong for negative numbers"))
STILL_RIGHT = written(RIGHT.replace("for value in values:", "for value in values[1:]:"))
CRASHES = written(RIGHT.replace("values[0]", "values[2]"))
ALL_WRONG = written("def biggest(values):\n    return 100")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal


async def test_the_first_subtle_bug_is_taken_and_verified(journal: Journal):
    made = await buggify([problem()], answering(SUBTLE), journal)
    (row,) = made.rows
    assert (made.attempts, dict(made.left_out)) == (1, {})
    (wrong,) = row["buggy_solutions"]
    assert wrong["solution"] == RIGHT.replace("values[0]", "0") + "\n"
    assert wrong["checks"] == {"pass": 2, "fail": 1, "error": 0}
    assert wrong["levenshtein_distance"] == edit_distance(RIGHT, wrong["solution"])
    assert row["solutions"] == [{"apps_solution_number": 0, "solution": RIGHT}]
    assert (row["apps_split"], row["apps_problem_id"], row["difficulty"]) == ("test", "p", "interview")


@pytest.mark.parametrize(
    ("answer", "objection"),
    [
        (NO_PROGRAM, "There is no Python program in a code block in it"),
        (UNCHANGED, "the program was not changed"),
        (COMMENTED, "It has new comments"),
        (STILL_RIGHT, "It passes all of its tests"),
        (CRASHES, "It does not run to its end on all tests (biggest([2, 1]) raised IndexError"),
        (ALL_WRONG, "It is wrong on all of its tests"),
    ],
)
async def test_what_is_no_subtle_bug_is_objected_to_and_asked_for_again(
    journal: Journal, answer: str, objection: str
):
    engine = answering(answer, SUBTLE)
    (row,) = (await buggify([problem()], engine, journal)).rows
    assert row["buggy_solutions"][0]["generation_attempts"] == 2
    first, second = engine.requests
    assert second.messages[:2] == first.messages and second.messages[2]["content"] == answer
    assert objection in second.messages[3]["content"]
    assert first.key != second.key
    assert RIGHT in str(first.messages[1]["content"]) and "Biggest?" in str(first.messages[1]["content"])


async def test_attempts_are_bounded(journal: Journal):
    engine = ScriptedEngine(lambda request: STILL_RIGHT)
    made = await buggify([problem()], engine, journal, BuggifySettings(max_attempts=3))
    assert (made.rows, dict(made.left_out), made.attempts) == ((), {"no fitting bug in 3 attempts": 1}, 3)
    assert len(engine.requests) == 3


async def test_problems_that_cannot_be_used_are_counted_by_reason(journal: Journal):
    problems = [
        problem("a"),
        problem("b", tests=None),
        problem("c", right=()),
        problem("d", right=("def biggest(values): return 3",)),
        problem("e", right=("def biggest(values): while",)),
    ]
    engine = answering(SUBTLE)
    made = await buggify(problems, engine, journal)
    assert [row["apps_problem_id"] for row in made.rows] == ["a"]
    assert dict(made.left_out) == {
        "it has no tests": 1,
        "it has no right program": 1,
        "its right program fails its tests": 2,
    }
    assert len(engine.requests) == 1


async def test_which_programs_are_made_wrong_is_drawn_from_the_seed(journal: Journal):
    several = tuple(f"# {number}\n{RIGHT}" for number in range(6))
    engine = ScriptedEngine(lambda request: SUBTLE)

    async def chosen(**settings: Any) -> list[int]:
        made = await buggify([problem(right=several)], engine, journal, BuggifySettings(**settings))
        return [one["apps_solution_number"] for one in made.rows[0]["buggy_solutions"]]

    assert len(await chosen()) == 1
    assert len(await chosen(share=0.5, most_per_problem=10)) == 3
    assert await chosen(most_per_problem=6) == list(range(6))
    assert len({tuple(await chosen(seed=seed)) for seed in range(8)}) > 1


async def test_a_run_that_was_stopped_pays_for_nothing_twice(tmp_path: Path):
    problems = [problem(name) for name in "abc"]
    asked: list[str] = []

    stopping: list[asyncio.Task[Any]] = []

    def script(request: ChatRequest) -> str:
        asked.append(str(request.key))
        if stopping and len(asked) == 3:
            stopping.pop().cancel()
        return STILL_RIGHT if len(request.messages) < 4 else SUBTLE

    with Journal(tmp_path / "whole.db") as journal:
        whole = await buggify(problems, ScriptedEngine(script), journal)
    paid = sorted(asked)
    asked.clear()

    with Journal(tmp_path / "run.db") as journal:
        task = asyncio.ensure_future(buggify(problems, ScriptedEngine(script), journal, max_concurrency=1))
        stopping.append(task)
        with pytest.raises(asyncio.CancelledError):
            await task
        resumed = await buggify(problems, ScriptedEngine(script), journal)
        assert resumed == whole
        before = len(asked)
        assert await buggify(problems, ScriptedEngine(script), journal) == whole
        assert len(asked) == before
    # The call under way when it was stopped may be made again, and no other.
    assert sorted(set(asked)) == paid and len(asked) <= len(paid) + 1


async def test_another_model_is_asked_anew_and_more_attempts_go_on(journal: Journal):
    first = ScriptedEngine(lambda request: STILL_RIGHT)
    await buggify([problem()], first, journal, BuggifySettings("a", max_attempts=2))
    await buggify([problem()], first, journal, BuggifySettings("a", max_attempts=3))
    assert len(first.requests) == 3
    made = await buggify([problem()], answering(SUBTLE), journal, BuggifySettings("b"))
    assert made.attempts == 1


async def test_failed_calls_leave_a_problem_out_until_the_next_time(journal: Journal):
    problems = [problem("a"), problem("b")]
    told: list[tuple[str, bool]] = []
    engine = answering(EngineError("HTTP 500"), SUBTLE)
    made = await buggify(
        problems,
        engine,
        journal,
        max_concurrency=1,
        on_problem=lambda name, row: told.append((name, row is not None)),
    )
    assert dict(made.left_out) == {"a call failed": 1}
    assert told == [("a", False), ("b", True)]
    again = await buggify(problems, answering(SUBTLE), journal)
    assert [row["apps_problem_id"] for row in again.rows] == ["a", "b"]


async def test_calls_that_all_fail_are_an_error(journal: Journal):
    engine = ScriptedEngine(lambda request: EngineError("HTTP 401"))
    with pytest.raises(EtudeError, match="the model's calls failed for all of 2 problems: HTTP 401"):
        await buggify([problem("a"), problem("b")], engine, journal)


async def test_the_rows_are_a_data_set(journal: Journal, tmp_path: Path):
    made = await buggify([problem("7")], answering(SUBTLE), journal)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.rows))
    examples = load_programs(BuggyAppsConfig(file_path=tmp_path / "rows.jsonl"))
    assert [(example.id, example.expected) for example in examples] == [("7-right-0", 1), ("7-wrong-0", 0)]


@pytest.mark.parametrize(
    "settings", [{"share": 0}, {"share": 1.5}, {"max_attempts": 0}, {"most_per_problem": 0}]
)
def test_settings_that_make_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(RequestError, match="must be"):
        BuggifySettings(**settings)


# Comparing programs.


def test_the_program_of_an_answer_is_its_last_block_of_python():
    assert program_in("```python\nx = 1\n```\nor rather\n```py\nx = 2\n```\n") == "x = 2\n"
    assert program_in("```\nx = 3\n```") == "x = 3\n"
    assert program_in("```python\nx = 1\n```\n```python\nx = = 2\n```") == "x = 1\n"
    assert program_in("```json\n{}\n```") is None
    assert program_in("x = 1") is None


def test_layout_and_comments_make_no_other_program():
    assert same_program("x = 1", "x  =  1  # one\n\n")
    assert not same_program("x = 1", "x = 2")
    assert comments("x = 1  # one\n# two\ns = '# no'\n") == 2


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_the_edit_distance_is_that_of_levenshtein(one: str, other: str):
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return slow(a[1:], b[1:])
        return 1 + min(slow(a[1:], b), slow(a, b[1:]), slow(a[1:], b[1:]))

    assert edit_distance(one, other) == slow(one, other)


def test_texts_that_differ_in_too_much_have_no_edit_distance():
    assert edit_distance("a" * 3000, "b" * 3000) is None
    assert edit_distance("a" * 30_000, "a" * 15_000 + "b" + "a" * 15_000) == 1
