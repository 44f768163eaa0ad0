"""Every API of an episode's endpoint, over a model that is sampled here: streamed, counted, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.inference.embedded import EmbeddedEngine
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


async def test_prompts_as_they_stand_are_recorded_too(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> str:
        client = episode.openai()
        ids = engine.speech.tokenizer("yes or")["input_ids"]
        answer = await client.completions.create(
            model="policy", prompt=[ids], max_tokens=4, temperature=0, logprobs=2
        )
        text = await client.completions.create(model="policy", prompt="yes or", max_tokens=4, temperature=0)
        assert text.choices[0].text == answer.choices[0].text
        assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [2] * 4
        return answer.choices[0].text

    record = await recorded(workflow, journal, engine)
    first, second = with_tokens(record)
    assert first.completion is not None and second.completion is not None
    assert first.completion.prompt_ids == second.completion.prompt_ids
    assert (first.request.prompt, second.request.prompt) == (first.completion.prompt_ids, "yes or")
    assert len(first.completion.top_logprobs) == 4
    assert timeless([await recorded(workflow, journal, engine)]) == timeless([record])


async def test_models_and_tokens_are_told(engine: EmbeddedEngine, journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        async with openai_client(episode.endpoint) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            answer = await client.chat.completions.create(model="policy", messages=ASK, max_tokens=1)
        async with anthropic_client(episode.endpoint) as claude:
            count = await claude.messages.count_tokens(model="policy", messages=ASK)
        assert count.input_tokens == answer.usage.prompt_tokens
        headers = {"authorization": f"Bearer {episode.endpoint.api_key}"}
        async with httpx.AsyncClient(base_url=episode.endpoint.base_url, headers=headers) as http:
            tokens = (await http.post("/tokenize", json={"messages": ASK})).json()
            assert tokens["count"] == count.input_tokens
            back = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
            assert ASK[0]["content"] in back["prompt"]
            wrong = await http.post("/detokenize", json={"tokens": [10**6]})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
            other = await http.get("/chat/completions")
            assert (other.status_code, other.json()["error"]["code"]) == (405, "method_not_allowed")
            image = [{"type": "image_url", "image_url": {"url": "data:"}}]
            for messages, told in (
                ([{"role": "user", "content": image}], "text only"),
                (ASK * 99, "context"),
            ):
                refused = await http.post("/chat/completions", json={"messages": messages})
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, "messages") and told in error["message"]
            assert error["code"] == "context_length_exceeded"
        return 0

    await recorded(workflow, journal, engine)


async def test_tokens_of_a_model_elsewhere_are_not_guessed(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> int:
        with pytest.raises(anthropic.BadRequestError, match="sampled by another server"):
            async with anthropic_client(episode.endpoint) as claude:
                await claude.messages.count_tokens(model="policy", messages=ASK)
        return 0

    await recorded(workflow, journal, EchoEngine())
