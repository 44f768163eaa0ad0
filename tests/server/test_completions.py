from __future__ import annotations

import openai
import pytest
from openai.types import Completion

from tests.server.process import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


def test_each_prompt_has_its_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["yes", "no"], n=2, max_tokens=5, seed=3)
    Completion.model_validate(answer.model_dump())
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="tiny", prompt="no", max_tokens=5, seed=3)
    assert alone.choices[0].text == answer.choices[2].text


def test_a_text_and_its_token_ids_are_the_same_prompt(server: ServerProcess, client: openai.OpenAI) -> None:
    with server.http() as http:
        ids = http.post("/tokenize", json={"prompt": "yes or"}).json()["tokens"]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    by_text = client.completions.create(prompt="yes or", **options).choices[0].model_dump()
    by_ids = client.completions.create(prompt=ids, **options).choices[0].model_dump()
    assert by_text == by_ids
    assert by_ids["prompt_token_ids"] == ids and 1 <= len(by_ids["token_ids"]) <= 6


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": ["yes", "it is"], "max_tokens": 20, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        told = [value for one in mine if one.logprobs for value in one.logprobs.token_logprobs or ()]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(told)
        assert mine[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize(
    ("prompt", "told"),
    [([], "at least 1"), ("", "empty|at least 1"), ([7, 10**6], "not in the vocabulary"), ([-1], "prompt")],
)
def test_a_prompt_that_cannot_be_is_refused(client: openai.OpenAI, prompt: object, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.completions.create(model="tiny", prompt=prompt)
