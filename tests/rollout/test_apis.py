"""Every API of an episode's endpoint, over a model that is sampled here, and calls that none could answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.engines.embedded import EmbeddedEngine
from etude.engines.openai_compatible import OpenAiEngine
from etude.engines.openai_config import OpenAiLlmConfig
from etude.store.journal import Journal
from tests.rollout.running import collect_one, timeless
from tests.support import EchoEngine
from tests.wire.dialects import anthropic_client, openai_client

ASK: list[dict[str, Any]] = [{"role": "user", "content": "what is 1 + 2?"}]


async def recorded(workflow: Callable[..., Any], journal: Journal, engine: Any) -> EpisodeRecord:
    record = await collect_one(workflow, journal, engine=engine)
    assert record.failure is None, record.failure
    return record


def with_tokens(record: EpisodeRecord) -> list[Call]:
    for call in record.calls:
        assert call.completion is not None and call.completion.completion_ids and call.completion.prompt_ids
        assert len(call.completion.logprobs or ()) == len(call.completion.completion_ids)
    return list(record.calls)


async def test_all_apis_stream_what_is_recorded(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> list[str]:
        async with openai_client(episode.endpoint) as client:
            chunks = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(
                    model="policy", messages=ASK, stream=True, seed=3
                )
            ]
            assert len(chunks) > 4
            stream = await client.responses.create(model="policy", input="yes or no?", stream=True)
            events = [event async for event in stream]
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            text = events[-1].response.output_text
            assert len(deltas) > 1 and "".join(deltas) == text
        async with (
            anthropic_client(episode.endpoint) as claude,
            claude.messages.stream(model="policy", max_tokens=9, messages=ASK) as talk,
        ):
            pieces = [piece async for piece in talk.text_stream]
            message = await talk.get_final_message()
        assert len(pieces) > 1 and "".join(pieces) == message.content[0].text
        return ["".join(chunks), text, message.content[0].text]

    record = await recorded(workflow, journal, engine)
    said = [call.completion.message["content"] for call in with_tokens(record) if call.completion]
    assert record.output == said
    again = await recorded(workflow, journal, EchoEngine())
    assert timeless([again]) == timeless([record]), "from the journal"


async def test_several_answers_are_calls_of_their_own(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        client = episode.openai()
        for seed in (None, 7):
            answer = await client.chat.completions.create(model="policy", messages=ASK, n=3, seed=seed)
            texts = [choice.message.content for choice in answer.choices]
            assert len(set(texts)) == 3, "each has randomness of its own"
        return 0

    record = await recorded(workflow, journal, engine)
    calls = with_tokens(record)
    assert len(calls) == 6 and len({call.request.key for call in calls}) == 6


async def test_models_and_tokens_are_told(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        async with openai_client(episode.endpoint) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            answer = await client.chat.completions.create(model="policy", messages=ASK, max_tokens=1)
        async with anthropic_client(episode.endpoint) as claude:
            count = await claude.messages.count_tokens(model="policy", messages=ASK)
        assert count.input_tokens == answer.usage.prompt_tokens
        return 0

    await recorded(workflow, journal, engine)


async def test_tokens_of_a_model_elsewhere_are_not_guessed(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        with pytest.raises(anthropic.BadRequestError, match="another server samples the model"):
            async with anthropic_client(episode.endpoint) as claude:
                await claude.messages.count_tokens(model="policy", messages=ASK)
        return 0

    await recorded(workflow, journal, EchoEngine())


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
ODD = {"type": "object", "properties": {"a": {"type": "string", "not": {"minLength": 2}}}, "required": ["a"]}
ODD_FORMAT = {"type": "json_schema", "json_schema": {"name": "odd", "schema": ODD}}
STRICT = {"type": "function", "function": {"name": "odd", "parameters": ODD, "strict": True}}
RESPONSES_FORMAT = {"type": "json_schema", "name": "odd", "schema": ODD}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/chat/completions", {"messages": IMAGE}, "messages"),
    ("/chat/completions", {"messages": ASK * 99}, "messages"),
    ("/chat/completions", {"chat_template_kwargs": {"sing": True}}, "chat_template_kwargs"),
    ("/chat/completions", {"logit_bias": {"100000": 1}}, "logit_bias"),
    ("/chat/completions", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("/chat/completions", {"temperature": -1}, "temperature"),
    ("/chat/completions", {"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ("/chat/completions", {"response_format": ODD_FORMAT}, "response_format"),
    ("/chat/completions", {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ("/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/chat/completions", {"tools": [STRICT]}, "tools"),
    ("/chat/completions", {"temperature": "hot"}, "temperature"),
    ("/chat/completions", {"unheard_of": 1}, "unheard_of"),
    (
        "/chat/completions",
        {"stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ("/completions", {"prompt": "yes", "add_special_tokens": False}, "add_special_tokens"),
    ("/responses", {"input": "yes", "truncation": "auto"}, "truncation"),
    ("/chat/completions", {"stop": 5}, "stop"),
    ("/chat/completions", {"messages": "hi"}, "messages"),
    ("/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/chat/completions", {"messages": [*ASK, RESULT]}, "messages[1].tool_call_id"),
    ("/completions", {"prompt": [7, 100000]}, "prompt"),
    ("/completions", {"prompt": "yes or no? " * 400}, "prompt"),
    ("/completions", {"prompt": "yes", "structured_outputs": {"json": ODD}}, "structured_outputs"),
    ("/responses", {"input": "yes or no? " * 400}, "input"),
    ("/responses", {"input": [{"role": "wizard", "content": "x"}]}, "input[0].message.role"),
    ("/responses", {"input": [{"type": "function_call_output", "call_id": "x", "output": "3"}]}, "input"),
    ("/responses", {"input": "yes", "text": {"format": RESPONSES_FORMAT}}, "text.format"),
]
"""Refused by an endpoint and a server alike."""
TOO_FEW: tuple[str, dict[str, Any], str] = ("/chat/completions", {"min_tokens": 50}, "min_tokens")
"""For an engine with fewer `max_tokens` of its own."""


async def test_the_field_that_is_refused_is_named(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        headers = {"authorization": f"Bearer {episode.endpoint.api_key}"}
        async with httpx.AsyncClient(base_url=episode.endpoint.base_url, headers=headers) as http:
            for stream in (False, True):
                for path, fields, param in (*REFUSED, TOO_FEW):
                    chat = {"messages": ASK} if path == "/chat/completions" else {}
                    reply = await http.post(path, json={**chat, **fields, "stream": stream})
                    assert reply.status_code == 400, (fields, reply.text)
                    error = reply.json()["error"]
                    assert (reply.status_code, error["param"]) == (400, param), (fields, error)
                    assert error["type"] == "invalid_request_error"
                    assert error["code"] in ("invalid_value", "context_length_exceeded")
            reply = await http.options("/chat/completions")
            assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
        async with anthropic_client(episode.endpoint) as claude:
            with pytest.raises(anthropic.BadRequestError, match="context is 256 tokens"):
                await claude.messages.create(model="policy", messages=ASK * 99, max_tokens=3)
        return 0

    record = await collect_one(workflow, journal, engine=engine)
    assert record.failure is None, record.failure


async def test_an_endpoints_reason_is_passed_on(
    engine: EmbeddedEngine, journal: Journal, tmp_path: Path
) -> None:
    """An engine at the endpoint of an episode whose model is embedded."""

    async def workflow(example: Any, episode: Any) -> int:
        address = {"base_url": episode.endpoint.base_url, "api_key": episode.endpoint.api_key}
        remote = OpenAiEngine(OpenAiLlmConfig(model_name="policy", provider="etude", **address))

        async def ask(inner: Any, outer: Any) -> int:
            client = outer.openai()
            for fields, param, code in (
                ({"messages": ASK * 99}, "messages", "context_length_exceeded"),
                ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
                (
                    {"extra_body": {"structured_outputs": {"regex": "(a"}}},
                    "structured_outputs",
                    "invalid_value",
                ),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(**{"model": "m", "messages": ASK, **fields})
                assert (refused.value.param, refused.value.code) == (param, code)
            await outer.chat(ASK * 99)
            return 0

        try:
            record = await collect_one(ask, journal, engine=remote)
        finally:
            await remote.close()
        assert (record.failure.kind, record.failure.origin) == ("call_failed", "agent")
        return 0

    with Journal(tmp_path / "inner.db") as inner:
        record = await collect_one(workflow, inner, engine=engine)
    assert record.failure is None, record.failure
