"""Who may speak with the head, what is sent to a runner, and how errors and calls cross the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import Example
from etude.core.errors import PromptTooLong, RequestError, StoreError
from etude.loop.arguments import build_config
from etude.processes.link import (
    CallCache,
    Disconnected,
    Notify,
    RunnerLink,
    Stream,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    shake_hands,
)
from etude.processes.shipping import config_from_json, config_to_json, example_to_json
from tests.processes.playing import config_with

KEY = b"k" * 32
KEYS = {5: KEY}.__getitem__


@asynccontextmanager
async def connect() -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a connection."""
    there: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda reader, writer: there.set_result(Stream(reader, writer)), "127.0.0.1", 0
    )
    async with server:
        here = Stream(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        yield here, await there
        await asyncio.gather(here.close(), (await there).close())


async def test_both_ends_prove_that_they_know_the_key():
    async with connect() as (head, runner):
        here, there = (shake_hands(head, None, KEYS), shake_hands(runner, 5, KEYS))
        assert await asyncio.gather(here, there) == [5, 5]


@pytest.mark.parametrize("keys", [{5: b"another"}, {}, {6: KEY}])
async def test_a_stranger_is_turned_away(keys: dict[int, bytes]):
    async with connect() as (head, runner):
        calling = asyncio.ensure_future(shake_hands(runner, 5, KEYS))
        accepting = asyncio.ensure_future(shake_hands(head, None, keys.__getitem__))
        done, _ = await asyncio.wait({calling, accepting}, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(task.exception(), Disconnected | KeyError) for task in done)
        for task in (calling, accepting):
            task.cancel()


class OwnTrouble(RuntimeError):
    """An error that the other end does not know."""


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (PromptTooLong("too long", param="prompt"), PromptTooLong, "too long"),
        (StoreError("disk full"), StoreError, "disk full"),
        (ValueError("odd"), ValueError, "odd"),
        (OwnTrouble("mine"), RuntimeError, "OwnTrouble: mine"),
    ],
)
async def test_errors_cross_with_their_class(raised: Exception, kind: type[Exception], text: str):
    async def answer(method: str, parameters: dict[str, Any], note: Notify) -> Any:
        raise raised

    async with link_runner(answer) as (link, _):
        with pytest.raises(kind) as caught:
            await link.ask("anything", {})
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert getattr(caught.value, "param", None) == getattr(raised, "param", None)


@asynccontextmanager
async def link_runner(answer: Any) -> AsyncIterator[tuple[RunnerLink, RunnerLink]]:
    """Both ends of a link, of which the second answers."""

    async def nothing(method: str, parameters: dict[str, Any], note: Notify) -> None: ...

    async with connect() as (here, there):
        link, other = RunnerLink(here, nothing), RunnerLink(there, answer)
        serving = [asyncio.ensure_future(each.serve()) for each in (link, other)]
        yield link, other
        await link.close()
        await asyncio.gather(*serving)


async def test_a_waiting_call_is_told_that_the_other_end_is_gone():
    begun = asyncio.Event()

    async def answer(method: str, parameters: dict[str, Any], note: Notify) -> Any:
        begun.set()
        await asyncio.sleep(600)

    async with link_runner(answer) as (link, other):
        asking = asyncio.ensure_future(link.ask("anything", {}))
        await begun.wait()
        await other.close()
        for asked in (asking, link.ask("anything", {})):
            with pytest.raises(Disconnected):
                await asked


def test_a_config_arrives_as_it_was():
    """With its secrets, and with text that looks like a reference to the environment."""
    config = config_with(isolation="process")
    arrived = config_from_json(config_to_json(config))
    assert arrived.model_dump() == config.model_dump()
    for each in (config, arrived):
        assert each.llms["policy"].api_key.get_secret_value() == "sk-$HOME"  # type: ignore[attr-defined]


def test_what_only_this_program_has_cannot_be_sent():
    def own(example: Example, episode: Any) -> str:
        return "x"

    parts = dict.fromkeys(("model", "reward", "models", "examples", "scenario"))
    config = build_config(own, {**parts, "model": "some-model"}, [], {}, enabled=False)
    with pytest.raises(RequestError, match=r"workflow 'own' .*object"):
        config_to_json(config)


def test_a_training_whose_examples_only_this_program_has_can_be_sent():
    parts = dict.fromkeys(("models", "scenario")) | {"model": "m", "reward": "tests.processes.fragile:length"}
    parts["examples"] = [{"id": "a", "question": "b"}]
    config = build_config("tests.processes.fragile:play", parts, [], {}, enabled=True)
    assert config_from_json(config_to_json(config)).finetuning.enabled


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_an_example_is_sent_exactly_or_refused_by_its_id(value: Any):
    example = Example("a", {"value": value})
    assert repr(Example(**example_to_json(example))) == repr(example)  # NaN is not equal to itself.
    with pytest.raises(RequestError, match=r"example 'b' .*JSON"):
        example_to_json(Example("b", {"value": (value,)}))


def completion(text: str, prompt: tuple[int, ...]) -> Completion:
    return Completion(
        {"role": "assistant", "content": text}, "stop", prompt, (1, 2), (-0.1, -0.2), usage=Usage(3, 2)
    )


def test_calls_cross_as_differences_to_those_that_both_ends_know():
    """Those of an earlier attempt, which the head did not sample now, are sent once."""
    here: CallCache = {}
    there: CallCache = {}
    before = Call(0, "f", "m", ChatRequest(({"role": "user", "content": "old"},), conversation="e"))
    before = replace(before, completion=completion("answer", (5, 6)))
    earlier: tuple[Call, ...] = (before,)
    sizes = []
    for number in range(3):
        last = earlier[-1]
        assert last.completion is not None
        messages = (*last.request.messages, last.completion.message, {"role": "user", "content": str(number)})
        request = ChatRequest(messages, conversation="e", key=number, earlier=earlier)
        asked = encode_request(request, "m", number, here)
        sizes.append((len(asked["sent"]), len(asked["call"]["messages"])))
        arrived = decode_request(asked, there)
        assert arrived.request == request
        assert [call.completion for call in arrived.request.earlier] == [call.completion for call in earlier]
        answer = completion(f"a{number}", (5, 6, *range(number)))
        there[number] = replace(arrived, completion=answer)
        decoded = decode_answer(asked, encode_answer(there[number], there, asked["earlier"]), here)
        assert decoded == answer
        earlier = (*earlier, Call(number, "f", "m", replace(request, earlier=()), decoded))
    assert sizes == [(1, 1), (0, 1), (0, 1)]
