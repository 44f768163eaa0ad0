"""Calls as a person reads them: thinking, answer, tool calls and why the model stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.export.episodes import episode_transcript
from etude.store.encode import encode_episode
from etude.store.journal import Journal
from tests.support import tool_call

ASKED = {"role": "user", "content": "1 + 2?"}
CALLED = tool_call("add", {"a": 1, "b": 2}) | {"reasoning_content": "I add."}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
SAID = {"role": "assistant", "content": "It is", "reasoning_content": "3, then."}


@pytest.fixture
def record() -> EpisodeRecord:
    calls = (
        Call(0, "f", "m", ChatRequest((ASKED,)), Completion(CALLED, "tool_calls")),
        Call(1, "f", "m", ChatRequest((ASKED, CALLED, RESULT)), Completion(SAID, "length")),
        Call(2, "f", "m", ChatRequest((ASKED, SAID, ASKED)), Completion(SAID, "stop")),
    )
    return EpisodeRecord("eval/e/0", Example("e"), 0, calls, output="It is")


async def test_thinking_is_a_part_of_its_own(record: EpisodeRecord, tmp_path: Path) -> None:
    with Journal(tmp_path / "run.sqlite") as journal:
        await journal.put("eval/e/0", encode_episode(record, {}))
        run: Any = SimpleNamespace(journal=journal, path=tmp_path, name="r")
        shown = yaml.safe_load(episode_transcript(run, "eval/e/0"))
    first, second, third = shown["turns"]
    assert first["prompt"] == [{"user": "1 + 2?"}]
    assert (first["thinking"], first["tool_calls"]) == ("I add.", [{"add": {"a": 1, "b": 2}}])
    assert second["prompt"] == [{"tool": "3"}]
    said = {"thinking": "3, then.", "assistant": "It is"}
    assert second == second | said | {"finish_reason": "length"}
    assert third["prompt"] == [{"user": "1 + 2?"}, said, {"user": "1 + 2?"}]
    assert third == third | said | {"call": 2, "function": "f", "model": "m", "finish_reason": "stop"}
    assert shown["output"] == "It is"
