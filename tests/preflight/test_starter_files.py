"""The projects that `etude init --task` writes: who is right earns the whole reward, and nobody else does."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from examples.warm_up import measure

from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.core.message import Message
from etude.preflight.starter import write_starter
from tests.cli.projects import events
from tests.support import ScriptedEngine, tool_call

Project: TypeAlias = Callable[[str], Path]
ENDLESS = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers) "


@pytest.fixture
def project(tmp_path, monkeypatch) -> Iterator[Project]:
    """Writes a task's project, from where its modules can be imported."""
    before = {*sys.modules}

    def write(task: str) -> Path:
        write_starter(tmp_path / task, task)
        monkeypatch.chdir(tmp_path / task)
        monkeypatch.syspath_prepend(tmp_path / task)
        for module in (tmp_path / task).glob("*.py"):
            monkeypatch.delitem(sys.modules, module.stem, raising=False)
        return tmp_path / task

    yield write
    for name in ("agent", "shop"):
        if name not in before:
            sys.modules.pop(name, None)


def examples(folder: Path, name: str = "validation.jsonl") -> list[Example]:
    rows = events((folder / name).read_text())
    return [Example(row.pop("id"), row, row.pop("answer", None)) for row in rows]


def texts(request: ChatRequest, role: str = "user") -> list[str]:
    return [str(each["content"]) for each in request.messages if each["role"] == role]


async def score(workflow: Any, evaluator: Any, folder: Path, player: Callable[[ChatRequest], Any]) -> float:
    return (await measure(workflow, evaluator, ScriptedEngine(player), examples(folder)[:24])).mean


async def test_the_right_query_is_right_in_other_words_too(project):
    folder = project("sql")
    agent = import_module("agent")
    queries = {each.inputs["question"]: each.expected for each in examples(folder)}

    def right(request: ChatRequest) -> str:
        return f"SELECT * FROM ({queries[texts(request)[-1]]}) ORDER BY 1 DESC;"

    assert await score(agent.write_query, agent.same_rows, folder, right) == 1
    assert await score(agent.write_query, agent.same_rows, folder, lambda _: "I do not know") == 0
    assert await score(agent.write_query, agent.same_rows, folder, lambda _: "SELECT 1 WHERE 0") == 0


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM orders",
        "ATTACH 'other.db' AS other",
        "VACUUM INTO 'copy.db'",
        "PRAGMA journal_mode = WAL",
        "SELECT 1; DELETE FROM orders",
        "SELECT load_extension('x')",
    ],
)
def test_a_query_cannot_write(query, project):
    folder = project("sql")
    shop = import_module("shop")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert shop.query_rows(query) is None
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "query",
    [
        ENDLESS + "SELECT COUNT(*) FROM numbers",
        "SELECT COUNT(*) FROM orders a, orders b, orders c, orders d",
        "SELECT hex(zeroblob(100000000))",
        "SELECT '\0'",
        "",
    ],
)
def test_a_query_without_an_end_is_ended_and_a_bad_one_has_no_rows(query, project):
    project("sql")
    shop = import_module("shop")
    started = time.process_time()
    assert not shop.query_rows(query)
    assert time.process_time() - started < 5


async def test_who_halves_wins_and_who_counts_up_does_not(project):
    folder = project("game")
    agent = import_module("agent")

    def halves(request: ChatRequest) -> str:
        low, high = map(int, re.findall(r"\d+", texts(request)[0])[:2])
        for guess, hint in zip(texts(request, "assistant"), texts(request)[1:], strict=True):
            low, high = (int(guess) + 1, high) if "higher" in hint else (low, int(guess) - 1)
        return str((low + high) // 2)

    assert await score(agent.play, agent.victory, folder, halves) == 1
    assert await score(agent.play, agent.victory, folder, lambda _: "seven") == 0
    assert await score(agent.play, agent.victory, folder, lambda _: "1") < 0.1


@pytest.mark.slow
async def test_the_calculators_result_is_right_and_a_call_alone_is_not(project):
    folder = project("tool")
    agent = import_module("agent")
    sums = {each.inputs["question"]: each.expected for each in examples(folder)}

    def right(request: ChatRequest) -> str | Message:
        results = texts(request, "tool")
        return results[0] if results else tool_call("calculator", {"expression": sums[texts(request)[-1]]})

    assert await score(agent.solve, agent.correct, folder, right) == 1
    call = json.dumps({"expression": "1 + 1"})
    assert await score(agent.solve, agent.correct, folder, lambda _: tool_call("calculator", call)) == 0
