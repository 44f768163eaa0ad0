"""Tools in episodes: called within their limits, recorded, and given back when an episode is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from etude.core.episode import ToolLimits, ToolResult, ToolSet
from etude.core.errors import ToolError
from etude.rollout.evaluation import call_counts
from etude.rollout.recorder import ToolCall
from etude.rollout.tools import FunctionTools
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from tests.rollout.running import collect_one

asked_for: list[Any] = []


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: The first.
    """
    asked_for.append((left, right))
    return left + right


async def look_up(word: str) -> dict[str, str]:
    """Look a word up."""
    await asyncio.sleep(0)
    return {"word": word}


class Falling:
    """A tool whose calls end in the order of falling numbers, which takes all of them at the same time."""

    def __init__(self, count: int) -> None:
        self._ended = [threading.Event() for _ in range(count)]

    def fall(self, number: int) -> int:
        assert number + 1 == len(self._ended) or self._ended[number + 1].wait(60)
        self._ended[number].set()
        return number


def fail() -> str:
    raise OSError("disk full")


async def cancel() -> str:
    raise asyncio.CancelledError


def to_call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall("call_0", name, arguments, json.dumps(arguments))


async def record_results(journal: Journal, calls: list[ToolCall], **sets: ToolSet) -> Any:
    """The record of an episode that makes the calls one after the other."""

    async def workflow(example: Any, episode: Any) -> list[str]:
        async with episode.tools(*sets.values()) as tools:
            return [(await tools.call(call))["content"] for call in calls]

    return await collect_one(workflow, journal)


def functions(*made_of: Any, **bounds: Any) -> ToolSet:
    only, prefix = bounds.pop("only", None), bounds.pop("prefix", "")
    return ToolSet("here", FunctionTools(made_of), ToolLimits(**bounds), only, prefix)


async def test_functions_are_tools_and_what_goes_wrong_is_told_to_the_model(journal: Journal) -> None:
    calls = [
        to_call("add", left=1, right=2),
        to_call("add", left="1"),
        to_call("add", left="many"),
        to_call("look_up", word="etude"),
        to_call("fail"),
        to_call("cancel"),
        to_call("divide"),
        ToolCall("call_0", "add", None, "{left"),
    ]
    record = await record_results(journal, calls, tools=functions(add, look_up, fail, cancel))
    assert record.output[:2] == ["3", "2"]
    assert record.output[2].startswith("error: left: ") and "integer" in record.output[2]
    assert record.output[3:5] == ['{"word": "etude"}', "error: OSError: disk full"]
    assert "CancelledError" in record.output[5]
    assert record.output[6].endswith("tool 'divide'; tools: add, look_up, fail, cancel")
    assert record.output[7].startswith("error: ") and "JSON object" in record.output[7]
    outcomes = [event.tool.outcome for event in record.events]
    assert outcomes == ["ok", "ok", "error", "ok", "error", "error", "refused", "refused"]
    counts = {name: count for name, count in call_counts(record).items() if name.startswith("tool")}
    assert counts == {"tool_calls": 8, "tool_error": 3, "tool_refused": 2}
    assert read_episode(journal, record.id) == record


async def test_a_call_of_another_library_is_refused_by_name(journal: Journal) -> None:
    theirs: Any = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    record = await record_results(journal, [theirs], tools=functions(add))
    assert "ToolCall" in record.failure.reason and "'function'" in record.failure.reason


async def test_calls_run_at_the_same_time_and_answer_in_their_order(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> Any:
        async with episode.tools(Falling(3).fall, look_up) as tools:
            calls = [to_call("fall", number=number) for number in range(3)]
            messages = await tools.call_all([*calls, to_call("look_up", word="a")])
            return [message["content"] for message in messages]

    record = await collect_one(workflow, journal)
    assert record.output == ["0", "1", "2", '{"word": "a"}'], record.failure


async def test_limits_of_calls_and_characters(journal: Journal) -> None:
    def shout(times: int) -> str:
        return "A" * times

    calls = [to_call("shout", times=12), to_call("shout", times=3), to_call("shout", times=3)]
    record = await record_results(journal, calls, tools=functions(shout, max_calls=2, max_characters=10))
    assert record.output[:2] == ["A" * 10 + "… (the first 10 of 12 characters)", "AAA"]
    assert record.output[2].startswith("error: all 2 calls ")


async def test_a_tool_that_takes_too_long_fails_the_episode(journal: Journal) -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    record = await record_results(journal, [to_call("slow")], tools=functions(slow, call_timeout=0.1))
    assert (record.failure.kind, record.failure.origin) == ("tool_failed", "tool")
    assert re.search(r"tool 'slow' of 'here' .* 0\.1 s; .* here\.call_timeout", record.failure.reason)
    assert record.events[0].tool.outcome == "failed"


async def test_some_tools_of_a_set_and_names_with_a_prefix(journal: Journal) -> None:
    sets = {"left": functions(add, fail, only=("add",), prefix="my_"), "right": functions(add)}
    calls = [to_call("my_add", left=1), to_call("add", left=2), to_call("my_fail")]
    record = await record_results(journal, calls, **sets)
    assert record.output[:2] == ["2", "3"] and record.output[2].endswith("'my_fail'; tools: my_add, add")
    await journal.forget(record.id)
    clash = await record_results(journal, [], left=functions(add), right=functions(add))
    assert re.search("'here' and 'here' .* tool 'add'; .*{prefix: here_, …}", clash.failure.reason)


async def test_tools_that_cannot_be_closed_after_their_agent_end_no_run(journal: Journal) -> None:
    class Lost:
        tools, forgets = (), False

        @contextlib.asynccontextmanager
        async def open(self) -> AsyncIterator[Any]:
            yield self
            raise OSError("the server is gone")

    async def workflow(example: Any, episode: Any) -> str:
        left_open.append(episode.tools(ToolSet("lost", Lost())))
        await left_open[0].__aenter__()
        return "done"

    left_open = list[Any]()
    record = await collect_one(workflow, journal)
    assert record.output == "done" and record.failure is None
    assert [event.kind for event in record.events] == ["note"]
    assert "OSError: the server is gone" in record.events[0].text


async def test_plain_functions_call_tools_too(journal: Journal) -> None:
    def workflow(example: Any, episode: Any) -> list[str]:
        with episode.tools("numbers") as tools:
            first = tools.call(to_call("add", left=1))
            return [
                first["content"],
                *(each["content"] for each in tools.call_all([to_call("add", left=2)] * 2)),
            ]

    record = await collect_one(workflow, journal, tools={"numbers": functions(add)})
    assert record.output == ["2", "3", "3"]


class Counting:
    """Counts within a session; a new session begins at 0."""

    forgets = True
    tools = ({"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}},)

    def __init__(self, *, dies_at: int = 99, of: BaseException | None = None) -> None:
        self.sessions, self._dies_at, self._of = 0, dies_at, of

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Counting]:
        self.sessions += 1
        self._count = 0
        if self._dies_at == 0 and self._of is not None:
            raise self._of
        yield self

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self._count += 1
        if self._count == self._dies_at and self._of is not None:
            raise self._of
        return ToolResult(str(self._count))


@pytest.mark.parametrize("forgets", [True, False])
async def test_a_resumed_episode_has_the_results_it_had(journal: Journal, forgets: bool) -> None:
    source, is_stopped = Counting(), True
    source.forgets = forgets

    async def workflow(example: Any, episode: Any) -> list[str]:
        async with episode.tools("numbers") as tools:
            results = [(await tools.call(to_call("count")))["content"] for _ in range(2 if is_stopped else 3)]
        if is_stopped:
            raise RuntimeError("stopped")
        return results

    tools = {"numbers": ToolSet("numbers", source)}
    await journal.forget((await collect_one(workflow, journal, tools=tools)).id)
    is_stopped = False
    resumed = await collect_one(workflow, journal, tools=tools)
    # A session that forgets is first brought to where the old one was.
    assert resumed.output == ["1", "2", "3" if forgets else "1"]


@pytest.mark.parametrize("dies_at", [0, 2], ids=["opening", "second call"])
@pytest.mark.parametrize("kind", [ToolError, OSError, asyncio.CancelledError, SystemExit])
async def test_an_agent_may_go_on_without_failed_tools(journal: Journal, kind: Any, dies_at: int) -> None:
    async def workflow(example: Any, episode: Any) -> str:
        try:
            async with episode.tools("numbers") as tools:
                await tools.call_all([to_call("count"), to_call("count")])
        except ToolError as error:
            return f"went on: {error}"
        return "unreachable"

    tools = {"numbers": ToolSet("numbers", Counting(dies_at=dies_at, of=kind("out of numbers")))}
    record = await collect_one(workflow, journal, tools=tools)
    assert re.fullmatch("went on: .*out of numbers", record.output)
    assert sorted(event.tool.outcome for event in record.events if event.tool) == ["failed", "ok"][:dies_at]
    assert call_counts(record).get("tool_failed", 0) == (dies_at > 0)
