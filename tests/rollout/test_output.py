"""Outputs of workflows: kept as they are, or a failure that says what came."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy
import pydantic
import pytest
import torch

from etude.store.journal import Journal
from tests.rollout.running import collect_one
from tests.support import ScriptedEngine

ASK = [{"role": "user", "content": "hi"}]


class Answer(pydantic.BaseModel):
    value: int


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("returned", "output"),
    [
        ("", ""),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (torch.tensor(2), 2),
        ([numpy.int64(1), (2,)], [1, [2]]),
        (Answer(value=1), {"value": 1}),
        (Point(1), {"x": 1}),
    ],
)
async def test_values_are_kept(journal: Journal, returned: Any, output: Any) -> None:
    async def play(example, episode):
        return returned

    record = await collect_one(play, journal)
    assert (record.output, type(record.output), record.failure) == (output, type(output), None)


async def test_a_reply_within_an_output_is_its_text_too(journal: Journal) -> None:
    async def play(example, episode):
        reply = await episode.chat(ASK)
        return {"answer": reply, "all": (reply,)}

    record = await collect_one(play, journal, engine=ScriptedEngine(["four"]))
    assert record.output == {"answer": "four", "all": ["four"]}


def cyclic() -> list[Any]:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    return holds_itself


async def never_awaited() -> str:
    return "4"


async def stream() -> Any:
    yield "4"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda example, episode: never_awaited(), "returned a coroutine that nobody awaited"),
        (lambda example, episode: asyncio.get_running_loop().create_future(), "Future that nobody awaited"),
        (lambda example, episode: (word for word in "four"), "returned a generator (does it `yield`?)"),
        (lambda example, episode: stream(), "returned an async_generator (does it `yield`?)"),
        (lambda example, episode: example, "returned an Example of etude; return the text of the answer"),
        (lambda example, episode: episode.chat, "the output cannot be kept"),
        (lambda example, episode: numpy.zeros(2), "numpy.ndarray is not JSON; return text"),
        (lambda example, episode: {1: "int", "1": "text"}, "two keys of one text"),
        (lambda example, episode: cyclic(), "holds itself, or is too deep"),
    ],
)
async def test_what_is_no_output_fails_the_episode_in_a_sentence(
    journal: Journal, make: Any, told: str
) -> None:
    async def play(example, episode):
        return make(example, episode)

    record = await collect_one(play, journal)
    assert record.output is None and record.failure is not None
    assert record.failure.kind == "no_output"
    assert "test_output.py:" in record.failure.reason and told in record.failure.reason


async def test_a_reply_that_calls_tools_and_says_nothing_is_no_answer(journal: Journal) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    async def play(example, episode):
        return await episode.chat(ASK)

    record = await collect_one(play, journal, engine=ScriptedEngine([message]))
    assert record.failure is not None and "calls tools (look); call them" in record.failure.reason
