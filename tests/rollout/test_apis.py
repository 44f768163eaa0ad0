"""A call that the model of an episode cannot answer is refused by its field, also through another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from etude.engines.embedded import EmbeddedEngine
from etude.engines.openai_compatible import OpenAiEngine
from etude.engines.openai_config import OpenAiLlmConfig
from etude.store.journal import Journal
from tests.rollout.running import collect_one
from tests.support import EchoEngine
from tests.wire.dialects import anthropic_client

ASK: list[dict[str, Any]] = [{"role": "user", "content": "what is 1 + 2?"}]


async def test_tokens_of_a_model_elsewhere_are_not_guessed(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        with pytest.raises(anthropic.BadRequestError, match="another server samples the model"):
            async with anthropic_client(episode.endpoint) as claude:
                await claude.messages.count_tokens(model="policy", messages=ASK)
        return 0

    record = await collect_one(workflow, journal, engine=EchoEngine())
    assert record.failure is None, record.failure


ODD = {"type": "object", "properties": {"a": {"type": "string", "not": {"minLength": 2}}}, "required": ["a"]}
ODD_FORMAT = {"type": "json_schema", "json_schema": {"name": "odd", "schema": ODD}}
STRICT = {"type": "function", "function": {"name": "odd", "parameters": ODD, "strict": True}}
RESPONSES_FORMAT = {"type": "json_schema", "name": "odd", "schema": ODD}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/chat/completions", {"messages": ASK * 99}, "messages"),
    ("/chat/completions", {"chat_template_kwargs": {"sing": True}}, "chat_template_kwargs"),
    ("/chat/completions", {"logit_bias": {"100000": 1}}, "logit_bias"),
    ("/chat/completions", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("/chat/completions", {"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ("/chat/completions", {"response_format": ODD_FORMAT}, "response_format"),
    ("/chat/completions", {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ("/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/chat/completions", {"tools": [STRICT]}, "tools"),
    ("/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/chat/completions", {"messages": [*ASK, RESULT]}, "messages[1].tool_call_id"),
    ("/completions", {"prompt": [7, 100000]}, "prompt"),
    ("/completions", {"prompt": "yes or no? " * 400}, "prompt"),
    ("/completions", {"prompt": "yes", "structured_outputs": {"json": ODD}}, "structured_outputs"),
    ("/responses", {"input": "yes or no? " * 400}, "input"),
    ("/responses", {"input": [{"role": "wizard", "content": "x"}]}, "input[0].message.role"),
    ("/responses", {"input": "yes", "text": {"format": RESPONSES_FORMAT}}, "text.format"),
    # The engine has fewer `max_tokens` of its own.
    ("/chat/completions", {"min_tokens": 50}, "min_tokens"),
]
"""The model itself cannot do it; tests/wire/test_fields.py has what no model can."""


async def test_the_field_that_is_refused_is_named(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        headers = {"authorization": f"Bearer {episode.endpoint.api_key}"}
        async with httpx.AsyncClient(base_url=episode.endpoint.base_url, headers=headers) as http:
            for stream in (False, True):
                for path, fields, param in REFUSED:
                    chat = {"messages": ASK} if path == "/chat/completions" else {}
                    reply = await http.post(path, json={**chat, **fields, "stream": stream})
                    assert reply.status_code == 400, (fields, reply.text)
                    error = reply.json()["error"]
                    assert (reply.status_code, error["param"]) == (400, param), (fields, error)
                    assert error["type"] == "invalid_request_error"
                    assert error["code"] in ("invalid_value", "context_length_exceeded")
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
