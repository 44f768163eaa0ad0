from __future__ import annotations

import math

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.process import ServerProcess

ASK = [{"role": "user", "content": "what is 1 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
IDS = {"return_token_ids": True}


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


def test_the_answer_is_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=8, temperature=0)
    ChatCompletion.model_validate(answer.model_dump())
    (choice,) = answer.choices
    assert answer.model == "tiny"
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_seed_makes_the_same_answers_again_and_each_choice_another(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, n=3, seed=seed)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert texts(5) == texts(5) != texts(6)
    assert len(set(texts(5))) == 3
    alone = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, seed=5)
    assert alone.choices[0].message.content == texts(5)[0]


def test_token_ids_come_in_vllms_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=6, logprobs=True, extra_body=IDS
    ).model_dump()
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_logprobs_are_those_of_the_sampling_distribution(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=4, logprobs=True, top_logprobs=20, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for token in logprobs.content:
        best = token.top_logprobs
        assert len(best) == 20
        assert best[0].logprob == token.logprob == max(one.logprob for one in best)
        assert sum(math.exp(one.logprob) for one in best) <= 1 + 1e-6
        assert bytes(token.bytes or ()).decode(errors="replace") == token.token


def test_tokens_can_be_named_by_their_ids(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=4,
        logprobs=True,
        extra_body=IDS | {"return_tokens_as_token_ids": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    ids = answer.choices[0].model_dump()["token_ids"]
    assert [token.token for token in logprobs.content] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_says_the_same_piece_by_piece(client: openai.OpenAI, seed: int) -> None:
    options = {"model": "tiny", "messages": ASK, "max_tokens": 24, "seed": seed, "n": 2}
    options |= {"logprobs": True, "extra_body": IDS}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert len(chunks) > 8
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        ids = [token for one in mine for token in one.model_dump()["token_ids"]]
        assert ids == choice.model_dump()["token_ids"]
        told = [token for one in mine if one.logprobs for token in one.logprobs.content or ()]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        said = [token.logprob for token in choice.logprobs.content]
        assert [token.logprob for token in told] == pytest.approx(said)
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]


def test_a_stop_string_is_never_shown_even_in_part(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": ASK, "max_tokens": 40, "seed": 2}
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text is not None and len(text) > 8
    stop = text[4:7]
    cut = client.chat.completions.create(**options, stop=[stop, "never"])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**options, stop=stop, stream=True)
    ]
    assert "".join(pieces) == cut.choices[0].message.content


def test_tools_reach_the_prompt(client: openai.OpenAI) -> None:
    def prompt(**options: object) -> list[int]:
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=1, extra_body=IDS, **options
        )
        return answer.model_dump()["prompt_token_ids"]

    plain = prompt()
    assert len(prompt(tools=[TOOL])) > len(plain)
    assert prompt(tools=[TOOL], tool_choice="none") == prompt(tools=[TOOL])
    streamed = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=5, tools=[TOOL], stream=True, seed=1
    )
    whole = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=5, tools=[TOOL], seed=1)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole.choices[0].message.content


def test_tokenize_tells_the_ids_that_a_prompt_has(server: ServerProcess, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1, extra_body=IDS)
    with server.http() as http:
        told = http.post("/tokenize", json={"messages": ASK, "return_token_strs": True}).json()
        plain = http.post("/tokenize", json={"model": "tiny", "prompt": "yes"}).json()
        again = http.post("/tokenize", json={"messages": ASK, "add_special_tokens": True})
    assert told["tokens"] == answer.model_dump()["prompt_token_ids"]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 128
    assert plain["count"] == len(plain["tokens"]) > 0 and plain["token_strs"] is None
    assert again.status_code == 400 and "add_special_tokens" in again.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "param", "told"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "?"}]}, "messages[0]", r"messages\[0\] must be a dict with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", r"messages\[0\].content"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1|greater than or equal to 1"),
        ({"n": 1000}, "n", "128"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be of the type"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of", "'unheard_of' is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"messages": [{"role": "user", "content": "1" * 4000}]}, "messages", "context is 128"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(
    client: openai.OpenAI, options: dict, param: str | None, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": ASK, "max_tokens": 2} | options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    for name in ("gone", "../../etc/passwd", "ft:tiny:x:0123"):
        with pytest.raises(openai.NotFoundError, match="there is no model") as caught:
            client.chat.completions.create(model=name, messages=ASK)
        assert caught.value.code == "model_not_found"


async def test_many_at_once_are_the_same_as_one_by_one(server: ServerProcess) -> None:
    import asyncio

    async with server.async_client() as client:

        async def ask(seed: int) -> str | None:
            answer = await client.chat.completions.create(
                model="tiny", messages=ASK, max_tokens=10, seed=seed
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*map(ask, range(24)))
        assert together == [await ask(seed) for seed in range(24)]
