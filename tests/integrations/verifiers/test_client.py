"""The client by which verifiers' server asks for what a program of an agent's asked it for."""

from __future__ import annotations

from typing import Any

import pytest

from etude.rollout.episode import Episode
from etude.store.journal import Journal
from tests.rollout.running import collect_one, tiny_engine
from tests.support import ScriptedEngine, needs, tool_call

pytestmark = [pytest.mark.verifiers, needs("verifiers")]

ASK = [{"role": "user", "content": "Who?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASK},
    "/responses": {"input": "Who?"},
    "/v1/messages": {"messages": ASK, "max_tokens": 64},
}


def make_client(episode: Episode) -> Any:
    from etude.integrations.verifiers.play import EpisodeCalls, EpisodeClient

    return EpisodeClient(EpisodeCalls(episode), "agent")


def find_dialect(path: str) -> Any:
    from verifiers.v1.dialects import DIALECTS

    return next(dialect for dialect in DIALECTS if dialect.upstream_path == path)


@pytest.mark.parametrize("answer", ["It was Ada.", tool_call("search", {"q": "Ada"})], ids=["text", "tool"])
@pytest.mark.parametrize("path", ASKED)
async def test_a_stream_is_the_answer_that_is_recorded(path: str, answer: Any, journal: Journal):
    from verifiers.v1.interception.server import _collect_stream

    async def play(example: Any, episode: Episode) -> tuple[str | None, list[str]]:
        dialect, body = find_dialect(path), {"model": "policy", "stream": True, **ASKED[path]}
        read, _ = await _collect_stream(dialect, await make_client(episode).relay(dialect, body))
        return read.message.content, [each.name for each in read.message.tool_calls or ()]

    record = await collect_one(play, journal, engine=ScriptedEngine([answer]))
    assert record.failure is None, record.failure
    assert [call.function for call in record.calls] == ["agent"]
    text, tools = record.output
    assert (text or None, tools) == (("It was Ada.", []) if isinstance(answer, str) else (None, ["search"]))


async def test_a_prompts_tokens_are_counted(journal: Journal):
    engine = tiny_engine()

    async def play(example: Any, episode: Episode) -> int:
        dialect, body = find_dialect("/v1/messages"), {"model": "policy", "messages": ASK}
        counted = await make_client(episode).relay_aux(dialect, "/v1/messages/count_tokens", body)
        await episode.chat(ASK, max_tokens=1)
        return int(counted["input_tokens"])

    record = await collect_one(play, journal, engine=engine)
    await engine.close()
    assert record.failure is None, record.failure
    completion = record.calls[0].completion
    assert completion is not None and record.output == len(completion.prompt_ids or ())
