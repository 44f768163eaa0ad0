"""Answers of a server, by the official clients; what each of them can ask for is in `tests/clients`."""

import anthropic
import openai
import pytest

from tests.server.process import ServerProcess

ASK = [{"role": "user", "content": "what is 1 + 2?"}]
IDS = {"return_token_ids": True}


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
    named = IDS | {"return_tokens_as_token_ids": True}
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=6, logprobs=True, extra_body=named
    ).model_dump()
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    told = [token["token"] for token in choice["logprobs"]["content"]]
    assert told == [f"token_id:{token}" for token in choice["token_ids"]]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [([], "at least 1"), ("", "empty|at least 1"), ([7, 10**6], "vocabulary"), ([-1], "prompt")],
)
def test_a_prompt_that_cannot_be_is_refused(client: openai.OpenAI, prompt: object, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.completions.create(model="tiny", prompt=prompt)


def test_errors_are_those_of_the_api(server: ServerProcess) -> None:
    claude = anthropic.Anthropic(base_url=server.address, api_key="x", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(model="gone", max_tokens=8, messages=ASK)
    assert raised.value.body["error"]["type"] == "not_found_error"
    for create in (server.client().chat.completions.create, claude.messages.create):
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            create(model="gone", max_tokens=8, messages=ASK, stream=True, timeout=20)
    with pytest.raises(anthropic.BadRequestError, match=" 128 tokens") as raised:
        claude.messages.create(model="tiny", max_tokens=8, messages=ASK * 99)
    assert "prompt is too long: " in raised.value.body["error"]["message"]  # Claude Code looks for it.
    with server.http() as http:
        told = {
            http.get("/v1/chat/completions"): (405, "method_not_allowed", None),
            http.get("/v1/nothing"): (404, "unknown_url", None),
            http.post("/v1/embeddings", json={"input": "x"}): (404, "unknown_url", None),
            http.post("/v1/chat/completions", content=b"{"): (400, "invalid_value", None),
            http.post("/v1/completions", json={"model": "tiny"}): (400, "invalid_value", "prompt"),
            http.post("/v1/chat/completions", json={"messages": ASK}): (400, "invalid_value", "model"),
        }
        for name in ("gone", "../../etc/passwd", "ft:tiny:x:0123"):
            unknown = http.post("/v1/chat/completions", json={"messages": ASK, "model": name})
            told[unknown] = (404, "model_not_found", "model")
    for response, expected in told.items():
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == expected
