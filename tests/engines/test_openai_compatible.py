"""The OpenAI engine against a real HTTP server that speaks the wire format, and misbehaves on demand."""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from email.message import Message
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion, Constraint, Sampling, Usage
from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.job import ModelVersion
from etude.engines import openai_compatible
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.wire.client import conversation_key, parse_completion
from etude.wire.retries import USUAL, Refusal, Retryable, count_retries
from tests.json_server import JsonServer
from tests.support import json_values

SECRET = "sk-do-not-show-me"
LOGPROBS = (-0.25, -1.5, -0.0078125)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def answer(**choice: Any) -> dict[str, Any]:
    """A chat completion as vLLM 0.32 writes it, optional fields and all."""
    logprobs = [{"token": "ab", "logprob": p, "bytes": [97, 98], "top_logprobs": []} for p in LOGPROBS]
    unset = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    message = {"role": "assistant", "content": "ababab", "tool_calls": [], **unset}
    usual = {"index": 0, "message": message, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_763_000_000,
        "model": "tiny",
        "choices": [usual | {"stop_reason": None, "token_ids": None} | choice],
        "usage": {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3},
        "prompt_token_ids": None,
    }


class Remote(JsonServer):
    """A stand-in for a remote endpoint: answers by script, then always well."""

    def __init__(self) -> None:
        super().__init__(self.handle)
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.barrier = threading.Barrier(1)
        """As many requests must have arrived before any is answered."""
        self.arrived = threading.Event()
        self.closing = threading.Event()

    def handle(self, path: str, headers: Message, body: bytes) -> tuple[Any, ...]:
        self.requests.append(json.loads(body))
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.arrived.set()
        self.barrier.wait(60)
        told = self.script.pop(0) if self.script else answer()
        if told == "hang":
            self.closing.wait()
        return told if isinstance(told, tuple) else (200, told)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(openai_compatible, "USUAL", replace(USUAL, first_wait=0.001))
    with Remote() as remote:
        yield remote
        remote.closing.set()


def config_for(remote: Remote, **fields: Any) -> OpenAiLlmConfig:
    settings = {"model_name": "tiny", "base_url": remote.url, "api_key": SECRET}
    return OpenAiLlmConfig.model_validate(settings | fields)


@pytest.fixture
async def engine(remote: Remote) -> AsyncIterator[OpenAiEngine]:
    engine = OpenAiEngine(config_for(remote, request_timeout=60))
    yield engine
    await engine.close()


def asking(text: str = "hello", **fields: Any) -> ChatRequest:
    return ChatRequest(messages=({"role": "user", "content": text},), **fields)


async def outcome(remote: Remote, request: ChatRequest | None = None, **fields: Any) -> Completion:
    """The answer to one call of an engine with this config."""
    engine = OpenAiEngine(config_for(remote, **fields))
    try:
        return await engine.complete(request or asking())
    finally:
        await engine.close()


async def test_a_request_and_its_answer_are_in_openais_words(remote: Remote, engine: OpenAiEngine) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, stop=("\n",))
    answered = await engine.complete(asking(tools=(ADD,), sampling=sampling, key=5 << 32))
    assert remote.requests == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 7,
            "stop": ["\n"],
            "seed": 5,
            "tools": [ADD],
            "logprobs": True,
        }
    ]
    assert remote.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert answered == Completion(
        message={"role": "assistant", "content": "ababab"},
        finish_reason="stop",
        logprobs=LOGPROBS,
        token_texts=("ab", "ab", "ab"),
        usage=Usage(prompt_tokens=5, completion_tokens=3),
    )


async def test_token_ids_are_asked_for_in_vllms_words_and_taken_from_its_answer(remote: Remote) -> None:
    remote.script = [answer(token_ids=[7, 8, 2]) | {"prompt_token_ids": [1, 5, 6]}]
    completion = await outcome(remote, return_token_ids=True)
    assert (completion.prompt_ids, completion.completion_ids) == ((1, 5, 6), (7, 8, 2))
    asked = remote.requests[0]
    assert asked["return_token_ids"] is True
    # Or the model's own generation config would shape the distribution behind the logprobs' back.
    assert (asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (-1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["token_id:7", "token_id:8", "token_id:2"], (7, 8, 2)),
        (["token_id:7", "a", "token_id:2"], None),
        (["token_id:", "token_id:x", "token_id:2"], None),
    ],
)
async def test_token_ids_may_be_the_names_of_the_tokens(remote: Remote, names: list[str], ids: Any) -> None:
    """As vLLM's `return_tokens_as_token_ids` has it, with which ART's servers run."""
    remote.script = [answer(logprobs={"content": [{"token": name, "logprob": -0.5} for name in names]})]
    completion = await outcome(remote, return_token_ids=True)
    assert (completion.completion_ids, completion.prompt_ids) == (ids, None)
    assert completion.logprobs == (-0.5, -0.5, -0.5)


async def test_a_provider_is_asked_in_its_own_words(remote: Remote) -> None:
    sampling = Sampling(max_tokens=9, stop=("x",))
    await outcome(remote, asking(sampling=sampling), provider="openai", logprobs=True)
    await outcome(remote, asking(sampling=sampling), provider="openai", model_name="o4-mini-2025-04-16")
    await outcome(remote, provider="openrouter")
    await outcome(remote, provider="openrouter", logprobs=True)
    await outcome(remote, provider="etude")
    usual, thinking, routed, with_logprobs, ours = remote.requests
    assert (usual["max_completion_tokens"], usual["logprobs"], usual["stop"]) == (9, True, ["x"])
    assert thinking.keys() == {"model", "messages", "seed", "max_completion_tokens"}
    assert "logprobs" not in routed
    assert with_logprobs["provider"] == {"require_parameters": True}
    assert (ours["return_token_ids"], ours["logprobs"]) == (True, True)
    assert "top_k" not in ours


async def test_extra_body_headers_and_omit_shape_the_request(remote: Remote) -> None:
    await outcome(
        remote,
        api_key=None,
        logprobs=False,
        extra_body={"response_format": {"type": "json_object"}},
        headers={"x-team": "blue"},
        omit=["seed", "temperature", "top_p"],
    )
    assert remote.requests[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_object"},
    }
    assert remote.headers[0]["x-team"] == "blue"
    assert "authorization" not in remote.headers[0]


async def test_a_router_is_told_which_calls_belong_together_and_nothing_of_the_episode(
    remote: Remote,
) -> None:
    for episode in ("train/0/1", "train/0/2", "train/0/1"):
        await outcome(remote, asking(conversation=episode), provider="vllm")
    first, other, again = (headers["x-session-id"] for headers in remote.headers)
    assert first == again != other and "train" not in first + other


async def test_tool_calls_come_back_as_openai_writes_them(remote: Remote) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    other = {"function": {"name": "add", "arguments": {"a": 2}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, other]}
    remote.script = [answer(message=message, finish_reason="tool_calls", logprobs=None)]
    completion = await outcome(remote)
    assert completion.finish_reason == "tool_calls"
    assert completion.message["tool_calls"] == [
        call,
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
    ]
    assert completion.logprobs is None


ASKED = {
    "top_k": (Sampling(top_k=5), {"top_k": 5}),
    "min_p": (Sampling(min_p=0.1), {"min_p": 0.1}),
    "min_tokens": (Sampling(min_tokens=3), {"min_tokens": 3}),
    "stop_token_ids": (Sampling(stop_token_ids=(7,)), {"stop_token_ids": [7]}),
    "repetition_penalty": (Sampling(repetition_penalty=1.2), {"repetition_penalty": 1.2}),
    "regex": (Sampling(constraint=Constraint("regex", "a+")), {"structured_outputs": {"regex": "a+"}}),
    "choice": (Sampling(constraint=Constraint("choice", '["a"]')), {"structured_outputs": {"choice": ["a"]}}),
    "penalties": (
        Sampling(frequency_penalty=0.5, presence_penalty=-1.0),
        {"frequency_penalty": 0.5, "presence_penalty": -1.0},
    ),
    "logit_bias": (Sampling(logit_bias=((5, -100.0),)), {"logit_bias": {"5": -100.0}}),
    "JSON": (Sampling(constraint=Constraint("json_object")), {"response_format": {"type": "json_object"}}),
    "JSON schema": (
        Sampling(constraint=Constraint("json_schema", '{"type": "object"}')),
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
            }
        },
    ),
}
OPENAI_HAS = ("penalties", "logit_bias", "JSON", "JSON schema")
OPENROUTER_HAS = (*OPENAI_HAS, "top_k", "min_p", "repetition_penalty")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("provider", ["vllm", "etude", "openai", "openrouter", "other"])
async def test_sampling_goes_through_or_is_refused_by_name(remote: Remote, provider: str, name: str) -> None:
    sampling, words = ASKED[name]
    has = {"openai": OPENAI_HAS, "other": OPENAI_HAS, "openrouter": OPENROUTER_HAS}.get(provider, ASKED)
    if name not in has:
        with pytest.raises(ImpossibleCall, match=f" {next(iter(words))}.* `provider: vllm`"):
            await outcome(remote, asking(sampling=sampling), provider=provider)
        assert not remote.requests
        return
    await outcome(remote, asking(sampling=sampling), provider=provider)
    assert remote.requests[0] == remote.requests[0] | words
    assert remote.requests[0].get("provider") == (
        {"require_parameters": True} if provider == "openrouter" else None
    )


@pytest.mark.parametrize(
    ("choice", "wire"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        ("function:add", {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_how_tools_may_be_called_goes_through(remote: Remote, choice: str, wire: Any) -> None:
    await outcome(remote, asking(tools=(ADD,), tool_choice=choice, parallel_tool_calls=choice == "auto"))
    assert remote.requests[0].get("tool_choice") == wire
    assert remote.requests[0].get("parallel_tool_calls") == (None if choice == "auto" else False)


async def test_template_options_go_through_or_are_refused(remote: Remote) -> None:
    options = {"reasoning_effort": "low", "enable_thinking": False}
    await outcome(remote, asking(template_options=options), provider="vllm")
    assert remote.requests[0]["reasoning_effort"] == "low"
    assert remote.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ImpossibleCall, match="chat_template_kwargs"):
        await outcome(remote, asking(template_options=options), provider="openai")
    await outcome(remote, asking(template_options={"reasoning_effort": "low"}), provider="openai")
    assert remote.requests[1]["reasoning_effort"] == "low"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thinking_is_a_part_of_its_own_whatever_it_is_called(remote: Remote, name: str) -> None:
    remote.script = [answer(message={"role": "assistant", "content": "4", name: "2 + 2"})]
    message = (await outcome(remote)).message
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    for provider in ("vllm", "openrouter", "openai"):
        await outcome(remote, ChatRequest(messages=(message,)), provider=provider)
    vllm, openrouter, openai = (request["messages"][0] for request in remote.requests[1:])
    assert vllm == message
    assert openrouter == {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    assert openai == {"role": "assistant", "content": "4"}


async def test_a_logprob_may_be_above_0_by_rounding(remote: Remote) -> None:
    tokens = [{"token": "a", "logprob": -1}, {"token": "b", "logprob": 2e-6}]
    remote.script = [answer(logprobs={"content": tokens})]
    assert (await outcome(remote)).logprobs == (-1.0, 2e-6)


async def test_retry_after_is_obeyed(remote: Remote) -> None:
    remote.script = [(429, "", {"retry-after": "0.3"})]
    started = time.monotonic()
    await outcome(remote)
    assert time.monotonic() - started >= 0.3


FAULT = 500, {"error": {"message": "CUDA error", "type": "internal"}}


async def test_when_the_retries_are_spent_the_error_says_what_where_and_how_often(remote: Remote) -> None:
    remote.script = [FAULT] * 3
    with pytest.raises(EngineError) as caught, count_retries() as count:
        await outcome(remote, max_retries=2)
    assert count.causes.total() == 2
    assert str(caught.value) == (
        f"model 'tiny' at {remote.url}: HTTP 500: CUDA error (internal) (attempt 3, the last)"
    )
    assert len(remote.requests) == 3


async def test_a_request_that_json_cannot_hold_is_refused(engine: OpenAiEngine) -> None:
    with pytest.raises(ImpossibleCall, match="written as JSON"):
        await engine.complete(ChatRequest(messages=({"role": "user", "content": object()},)))


async def test_secrets_are_never_shown(remote: Remote) -> None:
    remote.script = [(401, {"error": {"message": f"bad key {SECRET} and hush"}})]
    with pytest.raises(EngineError) as caught:
        await outcome(remote, headers={"x-key": "hush"})
    assert "bad key ********** and **********" in str(caught.value)
    assert SECRET not in repr(config_for(remote))


async def test_an_adopted_version_is_what_the_next_request_asks_for(
    remote: Remote, engine: OpenAiEngine
) -> None:
    before = await engine.complete(asking())
    version = ModelVersion(number=3, location="tiny-v3", digest="d")
    await engine.adopt(version)
    await engine.adopt(version)
    after = await engine.complete(asking())
    assert [request["model"] for request in remote.requests] == ["tiny", "tiny-v3"]
    assert (before.model_version, after.model_version, engine.version) == (0, 3, 3)


async def test_concurrent_calls_are_all_under_way_at_once(remote: Remote, engine: OpenAiEngine) -> None:
    remote.barrier = threading.Barrier(64)
    async with asyncio.timeout(60):
        completions = await asyncio.gather(*(engine.complete(asking(str(n))) for n in range(64)))
    assert len(completions) == 64


async def test_a_cancelled_call_leaves_the_engine_usable(remote: Remote, engine: OpenAiEngine) -> None:
    remote.script = ["hang"]
    call = asyncio.create_task(engine.complete(asking()))
    assert await asyncio.to_thread(remote.arrived.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await engine.complete(asking())).logprobs == LOGPROBS


def test_openai_itself_needs_a_key(remote: Remote) -> None:
    with pytest.raises(RequestError, match="Set OPENAI_API_KEY"):
        OpenAiEngine(OpenAiLlmConfig(model_name="gpt"))


async def test_address_and_key_come_from_the_environment(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", remote.url)
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    await outcome(remote, base_url=None, api_key=None)
    assert remote.headers[0]["authorization"] == f"Bearer {SECRET}"


@given(st.sampled_from(["choices", "message", "logprobs", "token_ids", "usage", "content"]), json_values())
def test_whatever_the_endpoint_says_is_a_completion_or_a_named_failure(field: str, junk: Any) -> None:
    reply = answer()
    choice = reply["choices"][0]
    target = {"choices": reply, "usage": reply, "content": choice["message"]}.get(field, choice)
    target[field] = junk
    try:
        completion = parse_completion(json.dumps(reply).encode())
    except (Retryable, Refusal):
        return
    assert completion.message["role"] == "assistant"
    assert completion.logprobs is None or all(math.isfinite(p) for p in completion.logprobs)


async def test_closing_ends_the_calls_under_way(remote: Remote, engine: OpenAiEngine) -> None:
    remote.script = ["hang"]
    call = asyncio.create_task(engine.complete(asking()))
    assert await asyncio.to_thread(remote.arrived.wait, 60)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(call, 60)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"base_url": "http://a/v1,http://b/v1"}, "one address: .* router"),
        ({"base_url": "localhost:8000"}, "http://localhost:8000/v1"),
        ({"base_url": "http://me:pass@host/v1"}, "use `api_key`"),
        ({"extra_body": {"n": 2}}, "cannot set n"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        OpenAiLlmConfig.model_validate({"model_name": "tiny"} | fields)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://openrouter.ai/api/v1", "openrouter"),
        ("https://eu.openrouter.ai/api/v1", "openrouter"),
        ("https://notopenrouter.ai/api/v1", "other"),
        ("https://api.openai.com.invalid/v1", "other"),
        ("http://localhost:8000/v1", "other"),
    ],
)
def test_a_provider_is_known_by_its_address_which_the_environment_may_have(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str
) -> None:
    assert OpenAiLlmConfig(model_name="m", base_url=url).provider_there.name == name
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/")
    config = OpenAiLlmConfig(model_name="m")
    assert (config.provider_there.name, config.address) == (name, url)


def test_without_an_episode_the_beginning_says_what_belongs_together() -> None:
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}
    answered = (system, question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"})
    first = conversation_key(ChatRequest(messages=(system, question)))
    assert conversation_key(ChatRequest(messages=answered)) == first
    other = (system, {"role": "user", "content": "2 + 2?"})
    assert conversation_key(ChatRequest(messages=other)) != first
    assert conversation_key(ChatRequest(messages=other, conversation="train/3")) == "train/3"
    ids = tuple(range(300))
    prompts = [conversation_key(ChatRequest(messages=(), prompt=ids + more)) for more in ((), (7, 8))]
    assert prompts[0] == prompts[1]
