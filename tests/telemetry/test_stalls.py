"""A run in which nothing moves says what it waits for, with the stacks, and ends at last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etude.config.schema import StallConfig
from etude.core.errors import StalledError
from etude.core.interfaces import Engine, Progress
from etude.runtime import Runtime, open_runtime
from etude.store.run_folder import RunFolder
from etude.telemetry import watchdog
from tests.runners.playing import config_with, examples
from tests.support import EchoEngine
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
        assert text.endswith(f"Stacks: {tmp_path / 'run' / 'stalls.txt'}")
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


async def test_an_event_loop_that_is_blocked_is_said_with_the_stacks_of_that_time(tmp_path: Path):
    messages = Messages()
    async with watched(tmp_path, messages, say_after=0.2):
        await asyncio.sleep(0.1)
        time.sleep(1)  # noqa: ASYNC251  that is what is wrong with it
        text = await messages.one_with("the event loop has been blocked for")
    assert "test_an_event_loop_that_is_blocked" in stacks(text)


async def test_a_job_that_is_waited_for_is_no_stall(tmp_path: Path):
    messages = Messages()
    async with watched(tmp_path, messages, episode=0.1, say_after=0.2, end_after=0.3) as runtime:
        assert runtime.watchdog is not None
        with runtime.watchdog.waiting_for_job():
            await asyncio.sleep(1)
        assert not messages.texts
        await messages.one_with("nothing has moved")
        runtime.progress.phase("training")
    assert (tmp_path / "run" / watchdog.STACKS).stat().st_size
