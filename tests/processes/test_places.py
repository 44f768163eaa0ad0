"""Which place an episode gets, what that costs where there are many, and runners that sample themselves."""

import asyncio
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from etude.core.interfaces import innermost
from etude.core.job import ModelVersion
from etude.processes.head import RunnerSlots
from tests.json_server import JsonServer, chat_completion
from tests.processes.playing import config_with, examples, open_run, read_run


class Guests:
    """Episodes that come and go."""

    def __init__(self, places: RunnerSlots) -> None:
        self.places = places
        self.seated: dict[str, int] = {}
        """The numbers of the places that they were given, in turn."""
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, alone: bool = False) -> None:
        for name in names:
            self._leaving[name] = asyncio.Event()
            self._tasks[name] = asyncio.ensure_future(self._sit(name, alone))
        await self._have_turns()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leaving[name].set()
        await self._have_turns()

    async def _have_turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)

    async def _sit(self, name: str, alone: bool) -> None:
        async with self.places.take(alone=alone) as place:
            self.seated[name] = place.number
            await self._leaving[name].wait()


async def test_the_place_with_the_fewest_is_next_and_who_waits_longest_is_served_first():
    guests = Guests(RunnerSlots(2, 2))
    await guests.come("a", "b", "c", "d", "e", "f", "g")
    assert guests.seated == {"a": 1, "b": 2, "c": 1, "d": 2}
    await guests.give_up("f")
    await guests.leave("b", "d")
    assert (guests.seated["e"], guests.seated["g"]) == (2, 2)


async def test_one_that_wants_to_be_alone_gets_a_place_that_is_emptied_for_it():
    guests = Guests(RunnerSlots(2, 2))
    await guests.come("a", "b", "c")
    await guests.come("alone", alone=True)
    await guests.come("d")
    assert "d" not in guests.seated, "the emptiest place is kept free"
    await guests.leave("b")
    assert guests.seated["alone"] == 2
    assert "d" not in guests.seated, "nobody sits with it"
    await guests.come("never", alone=True)
    await guests.give_up("never")
    await guests.leave("alone")
    assert guests.seated["d"] == 2


async def test_a_place_whose_runner_starts_is_given_to_nobody_until_it_has():
    places, ready = RunnerSlots(2, 1), asyncio.Event()
    guests = Guests(places)
    await guests.come("a")
    await guests.leave("a")
    [first, _] = places

    async def start() -> None:
        await ready.wait()

    places.hold(first, asyncio.ensure_future(start()))
    await guests.come("b", "c")
    assert guests.seated == {"a": 1, "b": 2}
    ready.set()
    await guests.come()
    assert guests.seated == {"a": 1, "b": 2, "c": 1}


async def test_episodes_that_wait_for_a_runner_get_the_reason_why_there_is_none():
    places = RunnerSlots(1, 1)
    [place] = places

    async def fail() -> None:
        raise ValueError("no such module")

    async def sit() -> None:
        async with places.take(alone=False):
            raise AssertionError("there is no runner")

    places.hold(place, asyncio.ensure_future(fail()))
    waiting, leaving = asyncio.ensure_future(sit()), asyncio.ensure_future(sit())
    place.starting.add_done_callback(lambda task: leaving.cancel())
    ends = await asyncio.gather(waiting, leaving, return_exceptions=True)
    assert [type(end) for end in ends] == [ValueError, asyncio.CancelledError]
    async with places.take(alone=False) as again:
        assert again is place


class Endpoint(JsonServer):
    """Answers with the name of the model that it was asked for."""

    def __init__(self) -> None:
        super().__init__(self._complete)
        self.asked: list[tuple[str, str]] = []
        """Models, with the keys that were shown."""

    def _complete(self, path: str, headers: Message, body: bytes) -> tuple[int, Any]:
        model = json.loads(body)["model"]
        self.asked.append((model, headers["authorization"]))
        return 200, chat_completion(model, model)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        yield server


@pytest.mark.slow
async def test_runners_sample_from_endpoints_themselves(tmp_path: Path, endpoint: Endpoint):
    """With the key that the config says, and from the version that was adopted last."""
    llm = {"_type": "openai", "model_name": "base", "api_key": "sk-secret", "logprobs": False}
    llm["base_url"] = endpoint.url
    config = config_with(llm, isolation="process", runners=1)
    async with open_run(tmp_path / "run", config, None) as runtime:
        engine = innermost(runtime.engines["policy"])
        complete, sampled_here = engine.complete, []

        async def note(request: Any) -> Any:
            sampled_here.append(request)
            return await complete(request)

        engine.complete = note  # type: ignore[method-assign]
        await runtime.evaluation.run(examples(""), phase="before")
        await engine.adopt(ModelVersion(number=1, location="tuned", digest="d"))
        await runtime.evaluation.run(examples(""), phase="after")
    assert sampled_here == []
    assert endpoint.asked == [("base", "Bearer sk-secret")] * 2 + [("tuned", "Bearer sk-secret")] * 2
    _, records = read_run(tmp_path / "run")
    assert [record.output for record in records] == ["tuned", "base"]
    answers = [call.completion for record in records for call in record.calls]
    assert [answer.model_version for answer in answers if answer is not None] == [1, 1, 0, 0]
    assert "sk-secret" not in (tmp_path / "run" / "runners" / "1.log").read_text()
