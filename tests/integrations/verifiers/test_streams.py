"""Streams of answers, as verifiers' server reads them for a program that asks for one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from etude.core.example import Example
from etude.rollout.collector import Collector, EpisodeJob
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow
from etude.store.journal import Journal
from tests.support import ScriptedEngine, tool_call

pytestmark = [
    pytest.mark.verifiers,
    pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed"),
]

ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "Who?"}]},
    "/responses": {"input": "Who?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 64},
}


@pytest.mark.parametrize("answer", ["It was Ada.", tool_call("search", {"q": "Ada"})], ids=["text", "tool"])
@pytest.mark.parametrize("path", ASKED)
async def test_a_stream_is_the_answer_that_is_recorded(path: str, answer: Any, tmp_path: Path):
    from verifiers.v1.dialects import DIALECTS
    from verifiers.v1.interception.server import _collect_stream

    from etude.integrations.verifiers.client import EpisodeCalls, EpisodeClientConfig

    (dialect,) = [each for each in DIALECTS if each.upstream_path == path]

    async def play(example: Example, episode: Episode) -> tuple[str | None, list[str]]:
        client = EpisodeClientConfig.of(EpisodeCalls(episode)).client("agent")
        body = {"model": "policy", "stream": True, **ASKED[path]}
        read, _ = await _collect_stream(dialect, await client.relay(dialect, body))
        return read.message.content, [each.name for each in read.message.tool_calls or ()]

    with Journal(tmp_path / "run.db") as journal:
        collector = Collector(
            Workflow("play", play), {"policy": ScriptedEngine([answer])}, journal, default_model="policy"
        )
        record = await collector.run(EpisodeJob("episode", Example("1", {})))
    assert record.failure is None, record.failure
    assert len(record.calls) == 1 and record.calls[0].function == "agent"
    text, tools = record.output
    assert (text or None, tools) == (("It was Ada.", []) if isinstance(answer, str) else (None, ["search"]))
