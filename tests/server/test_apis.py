"""The Responses API and Anthropic's messages of a server, by their own clients."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.rollout.test_refusals import REFUSED
from tests.server.process import ServerProcess

ASK = [{"role": "user", "content": "what is 1 + 2?"}]


@pytest.fixture
def claude(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="x", max_retries=0)


def test_responses_are_streamed_and_gone_on_from(server: ServerProcess) -> None:
    client = server.client()
    first = client.responses.create(model="tiny", input="yes or no?", max_output_tokens=8)
    events = list(
        client.responses.create(
            model="tiny", input="why?", previous_response_id=first.id, max_output_tokens=8, stream=True
        )
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert len(deltas) > 1 and "".join(deltas) == last.output_text
    assert last.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="tiny", input="why?", previous_response_id="resp_x")
    assert raised.value.param == "previous_response_id"


def test_messages_are_streamed_and_counted(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="tiny", max_tokens=8, messages=ASK) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == message.content[0].text
    count = claude.messages.count_tokens(model="tiny", messages=ASK)
    assert count.input_tokens == message.usage.input_tokens > 0


def test_errors_are_those_of_the_api(claude: anthropic.Anthropic, server: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(model="gone", max_tokens=8, messages=ASK)
    assert raised.value.body["error"]["type"] == "not_found_error"
    for create in (server.client().chat.completions.create, claude.messages.create):
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            create(model="gone", max_tokens=8, messages=ASK, stream=True, timeout=20)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the model's context is 128"):
        claude.messages.create(model="tiny", max_tokens=8, messages=ASK * 99)
    with server.http() as http:
        told = {
            http.get("/v1/chat/completions"): (405, "method_not_allowed", None),
            http.get("/v1/nothing"): (404, "unknown_url", None),
            http.post("/v1/embeddings", json={"input": "x"}): (404, "unknown_url", None),
            http.post("/v1/chat/completions", content=b"{"): (400, "invalid_value", None),
            http.post("/v1/completions", json={"model": "tiny"}): (400, "invalid_value", "prompt"),
            http.post("/v1/chat/completions", json={"messages": ASK}): (400, "invalid_value", "model"),
        }
    for response, expected in told.items():
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == expected


def test_what_an_endpoint_refuses_a_server_refuses_alike(server: ServerProcess) -> None:
    with server.http() as http:
        for stream in (False, True):
            for path, fields, param in REFUSED:
                chat = {"messages": ASK} if path == "/chat/completions" else {}
                reply = http.post(f"/v1{path}", json={"model": "tiny", **chat, **fields, "stream": stream})
                assert reply.status_code == 400, (fields, reply.text)
                error = reply.json()["error"]
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), (fields, error)
                assert error["code"] in ("invalid_value", "context_length_exceeded")


def test_what_was_tokenised_comes_back(server: ServerProcess) -> None:
    with server.http() as http:
        tokens = http.post("/tokenize", json={"prompt": "yes or no?", "add_special_tokens": False}).json()
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "yes or no?"}
