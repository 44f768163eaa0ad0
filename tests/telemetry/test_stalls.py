"""A run in which nothing moves says what it waits for, with the stacks, and ends at last."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.backends.trainer_adapter import job_status
from etude.config.schema import StallConfig
from etude.core.errors import StalledError
from etude.core.interfaces import Engine, Progress
from etude.core.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.runtime import Runtime, open_runtime
from etude.store.run_folder import RunFolder
from etude.telemetry import stalls
from tests.runners.playing import config_with, examples
from tests.support import EchoEngine, until
from tests.telemetry.test_status import Held

PATIENCE = 60.0
"""Seconds that a test waits for what has to come."""


class Messages(Progress):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str, *, warning: bool = False) -> None:
        self.texts.append(text)

    async def one_with(self, words: str, number: int = 1) -> str:
        """The first message that has these words, or a later one."""
        async with asyncio.timeout(PATIENCE):
            while True:
                texts = [text for text in self.texts if words in text]
                if len(texts) >= number:
                    return texts[number - 1]
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(
    folder: Path,
    messages: Messages,
    engine: Engine | None = None,
    episode: float = 300.0,
    **stall: float | None,
) -> AsyncIterator[Runtime]:
    """A run that is watched so."""
    config = config_with(max_concurrency=4, timeout=episode)
    config = config.model_copy(update={"stall": StallConfig.model_validate(stall)})
    with RunFolder.create(folder, "run") as run:
        async with open_runtime(
            config, run, progress=messages, engines={"policy": engine or EchoEngine()}
        ) as runtime:
            yield runtime


def stacks(text: str) -> str:
    """The report that a message names."""
    return Path(text.partition("Stacks: ")[2]).read_text(encoding="utf-8")


async def test_what_is_waited_for_is_said_with_the_stacks_and_that_it_goes_on_again(tmp_path: Path):
    engine, messages = Held(), Messages()
    async with watched(tmp_path, messages, engine, say_after=0.3) as runtime:
        going = asyncio.ensure_future(runtime.evaluation.run(examples(*[""] * 6), phase="eval"))
        text = await messages.one_with("nothing has moved for")
        assert "4 answers of model 'policy'" in text
        assert "an episode after 5 min 0 s (eval.general.timeout)" in text
        assert "the run 1 h 0 min after the last progress (stall.end_after)" in text
        assert text.endswith(f"Stacks: {tmp_path / 'run' / 'stalls' / '1.txt'}")
        assert "await self.free.wait()" in stacks(text)
        await messages.one_with("nothing has moved for", 2)
        engine.free.set()
        await going
        await messages.one_with("something moves again, after")


async def test_a_run_in_which_nothing_moves_ends_and_says_why(tmp_path: Path):
    messages = Messages()
    with pytest.raises(StalledError, match=r"^nothing has moved for .*`stall.end_after`"):
        async with watched(tmp_path, messages, episode=0.2, say_after=0.2, end_after=0.5):
            await asyncio.sleep(PATIENCE)
    assert messages.texts[-1].startswith("nothing has moved for ")


async def test_it_does_not_end_where_an_episode_may_take_longer_or_somebody_says_never(tmp_path: Path):
    for folder, episode, end_after in (("a", 300.0, 0.1), ("b", 0.1, None)):
        messages = Messages()
        async with watched(tmp_path / folder, messages, episode=episode, say_after=0.1, end_after=end_after):
            await messages.one_with("nothing has moved for", 2)


async def test_an_event_loop_that_is_blocked_is_said_too(tmp_path: Path):
    messages = Messages()
    async with watched(tmp_path, messages, say_after=0.2):
        await asyncio.sleep(0.1)
        end = time.monotonic() + PATIENCE
        while not messages.texts:
            assert time.monotonic() < end
    text = await messages.one_with("the event loop has been blocked for")
    assert "test_an_event_loop_that_is_blocked" in stacks(text)


async def test_a_job_that_comes_on_is_no_stall_and_one_that_does_not_is(tmp_path: Path):
    messages, steps, ref = Messages(), itertools.count(), TrainingJobRef(run_id="run-epoch-1", backend="b")

    async def moving() -> TrainingJobStatus:
        return job_status(ref, TrainingStatusEnum.RUNNING, progress=float(next(steps)))

    async def stuck() -> TrainingJobStatus:
        return job_status(ref, TrainingStatusEnum.RUNNING, progress=40.0, message="warming up")

    async with watched(tmp_path, messages, episode=0.1, say_after=0.2, end_after=0.3) as runtime:
        assert runtime.doctor is not None
        with runtime.doctor.waiting_for_job("run-epoch-1", 86400.0, moving):
            await asyncio.sleep(1)
        assert not [text for text in messages.texts if "nothing has moved" in text]
        with runtime.doctor.waiting_for_job("run-epoch-1", 86400.0, stuck):
            text = await messages.one_with("nothing has moved")
            assert "job run-epoch-1, which says: running, 40 %, warming up" in text
            assert "job run-epoch-1 after 24 h 0 min" in text
            await messages.one_with(
                "nothing has moved for", 2
            )  # Longer than `end_after`: a job has its own limit.


async def test_time_in_which_the_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    messages, stopped = Messages(), 0.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + stopped)
    monkeypatch.setattr(stalls, "time", clock)
    async with watched(tmp_path, messages, episode=0.1, say_after=10, end_after=10) as runtime:
        doctor, begun = runtime.doctor, clock.monotonic()
        assert doctor is not None
        await until(lambda: doctor._turned > begun)  # From then on it sleeps until the next look.
        stopped = 3600.0
        await until(lambda: doctor._turned > begun + stopped + 1)
    assert messages.texts == []
