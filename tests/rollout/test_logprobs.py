"""Calls to an episode's endpoint: refused by their fields, or with logprobs as a forward pass has them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch

from etude.core.call import ChatRequest, Completion, Usage
from etude.engines.embedded import EmbeddedEngine
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.store.journal import Journal
from tests.rollout.running import collect_one
from tests.support import EchoEngine, ScriptedEngine
from tests.wire.dialects import anthropic_client, openai_client

ASK: list[dict[str, Any]] = [{"role": "user", "content": "what is 1 + 2?"}]
PLAIN = {"model": "policy", "max_tokens": 4, "seed": 1}


def scores(engine: EmbeddedEngine, ids: Sequence[int]) -> torch.Tensor:
    """The log-softmax after each token [T, V], by one forward pass."""
    with torch.no_grad():
        return engine.policy.model(torch.tensor([list(ids)]), use_cache=False).logits[0].log_softmax(-1)


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-4)


class Silent(ScriptedEngine):
    """Tells the text of its answers, and how many tokens they have."""

    def __init__(self) -> None:
        super().__init__([])

    async def complete(self, request: ChatRequest) -> Completion:
        return Completion({"role": "assistant", "content": "yes"}, usage=Usage(3, 1))


def require_true(engine: EmbeddedEngine, reply: dict[str, Any]) -> None:
    """Logprobs of a chat completion and the likeliest tokens are the model's."""
    [choice], prompt = reply["choices"], reply["prompt_token_ids"]
    logprobs_TV = scores(engine, [*prompt, *choice["token_ids"]])
    best = logprobs_TV.topk(3)
    for index, entry in enumerate(choice["logprobs"]["content"], len(prompt) - 1):
        assert entry["logprob"] == near(
            float(logprobs_TV[index, choice["token_ids"][index + 1 - len(prompt)]])
        )
        assert [other["logprob"] for other in entry["top_logprobs"]] == near(best.values[index].tolist())


@asynccontextmanager
async def behind(episode: Any, **settings: Any) -> AsyncIterator[OpenAiEngine]:
    """An engine that asks an episode's endpoint."""
    address = {"base_url": episode.endpoint.base_url, "api_key": episode.endpoint.api_key}
    engine = OpenAiEngine(OpenAiLlmConfig(model_name="policy", **address, **settings))
    yield engine
    await engine.close()


async def ask_for_everything(engine: EmbeddedEngine, episode: Any) -> None:
    async with openai_client(episode.endpoint) as client:
        more = {"return_token_ids": True}
        chat = await client.chat.completions.create(
            messages=ASK, logprobs=True, top_logprobs=3, extra_body=more, **PLAIN
        )
        require_true(engine, chat.model_dump())
        prompt = engine.codec.tokenizer("yes or", add_special_tokens=False)["input_ids"]
        ids = {"return_token_ids": True}
        text = await client.completions.create(prompt="yes or", logprobs=2, extra_body=ids, **PLAIN)
        [choice] = text.choices
        told, logprobs = choice.model_dump(), choice.logprobs
        logprobs_TV = scores(engine, [*told["prompt_token_ids"], *told["token_ids"]])
        assert told["prompt_token_ids"] == prompt
        before_TV = logprobs_TV[len(prompt) - 1 : -1]
        own = before_TV.gather(1, torch.tensor(told["token_ids"])[:, None])[:, 0]
        assert logprobs.token_logprobs == near(own.tolist())
        for top, values in zip(logprobs.top_logprobs, before_TV.topk(2).values.tolist(), strict=True):
            assert sorted(top.values())[::-1] == near(values)
        assert len(logprobs.tokens) == len(told["token_ids"])


async def test_they_are_those_of_a_forward_pass_here_and_through_another_endpoint(
    engine: EmbeddedEngine, journal: Journal, tmp_path: Path
) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        await ask_for_everything(engine, episode)
        async with behind(episode, provider="etude") as remote:

            async def passed_on(example: Any, outer: Any) -> int:
                await ask_for_everything(engine, outer)
                return 0

            with Journal(tmp_path / "outer.db") as outer:
                record = await collect_one(passed_on, outer, engine=remote)
                assert record.failure is None, record.failure
                again = await collect_one(passed_on, outer)  # As it is read back, without an engine.
            assert again.calls == record.calls
        return 0

    record = await collect_one(workflow, journal, engine=engine)
    assert record.failure is None, record.failure


async def test_a_model_that_tells_none_fails_the_call_by_name(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        with pytest.raises(openai.BadRequestError, match="lacks what top_logprobs asks for") as refused:
            await episode.openai().chat.completions.create(
                model="m", messages=ASK, logprobs=True, top_logprobs=2
            )
        assert refused.value.param == "top_logprobs"
        return 0

    record = await collect_one(workflow, journal, engine=Silent())
    assert record.failure is None, record.failure


SAID = "é 😀 日本"


async def test_tokens_have_their_own_bytes_also_those_that_are_a_part_of_a_character(
    engine: EmbeddedEngine, journal: Journal
) -> None:
    form = {"structured_outputs": {"choice": [SAID]}}

    async def workflow(example: Any, episode: Any) -> int:
        client = episode.openai()
        asked = {"model": "policy", "messages": ASK, "max_tokens": 40, "logprobs": True, "top_logprobs": 5}
        asked |= {"extra_body": form}
        whole = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        streamed = [token for each in chunks if (told := each.choices[0].logprobs) for token in told.content]
        for tokens in (whole, streamed):
            assert b"".join(bytes(token.bytes) for token in tokens).decode() == f"{SAID}<|end|>"
            assert any(token.token == "\ufffd" for token in tokens)
        for token in [*whole, *streamed]:
            assert all(each.bytes for each in (token, *token.top_logprobs))
        return 0

    assert (await collect_one(workflow, journal, engine=engine)).output == 0


async def test_tokens_of_a_model_elsewhere_are_not_guessed(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        with pytest.raises(anthropic.BadRequestError, match=r"another server .* 'policy'"):
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
                    if stream and path == "/completions":
                        continue
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
    refusals = {
        "messages": ({"messages": ASK * 99}, "context_length_exceeded"),
        "logit_bias": ({"logit_bias": {"100000": 1}}, "invalid_value"),
        "structured_outputs": ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "invalid_value"),
    }

    async def ask(inner: Any, outer: Any) -> int:
        for param, (fields, code) in refusals.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await outer.openai().chat.completions.create(**{"model": "m", "messages": ASK, **fields})
            assert (refused.value.param, refused.value.code) == (param, code)
        await outer.chat(ASK * 99)
        return 0

    async def workflow(example: Any, episode: Any) -> int:
        async with behind(episode, provider="etude") as remote:
            record = await collect_one(ask, journal, engine=remote)
        assert (record.failure.kind, record.failure.origin) == ("call_failed", "agent")
        return 0

    with Journal(tmp_path / "inner.db") as inner:
        record = await collect_one(workflow, inner, engine=engine)
    assert record.failure is None, record.failure
