"""The watchdog: if a run makes no progress, it says what the run waits for, and at last ends the run.

It looks for traces of progress: events, entries of the journal, tokens, versions. `faulthandler` writes the
stacks of all threads if the event loop itself is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, TextIO

from etude.config.schema import StallConfig
from etude.core.errors import StalledError
from etude.core.stats import shown_seconds
from etude.processes.status import Parts, snapshot

STACKS = "stalls.txt"
"""In the run folder: the stacks of tasks and threads each time that the run stalled."""

_LOOKS = 20
"""The number of looks during `say_after`."""
_LEAST_EPISODES = 2.0
"""A stalled run is not ended before this multiple of an episode's `timeout`."""


class Watchdog:
    """The watchdog of a run. During a training job, the job's own limit applies instead."""

    def __init__(self, parts: Parts, config: StallConfig) -> None:
        self._parts = parts
        self._config = config
        self._stacks = parts.run.path / STACKS
        self._since = time.time()
        self._jobs = 0
        self._pulse: object = None
        self._moved = time.monotonic()
        self._said = 0
        """The number of warnings since the last progress."""
        self._diagnosis = ""

    @contextmanager
    def waiting_for_job(self) -> Iterator[None]:
        """Mark that the block waits for a training job, which may show nothing for hours."""
        self._jobs += 1
        try:
            yield
        finally:
            self._jobs -= 1
            self._note_progress()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the run during the block. Raises StalledError if the run is ended for lack of progress."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                looking = asyncio.ensure_future(self._look(limit))
                try:
                    yield
                finally:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StalledError(
                f"{self._diagnosis} The run has ended, and nothing in the journal is lost: fix what it "
                "waited for and resume it; `stall.end_after` sets how long it waits"
            ) from error

    async def _look(self, limit: asyncio.Timeout) -> None:
        """Look periodically, and expire `limit` to end the run."""
        pause, after = self._config.say_after / _LOOKS, self._config.say_after
        with self._stacks.open("a", encoding="utf-8") as file:
            try:
                while True:
                    faulthandler.dump_traceback_later(after, file=file)
                    asleep = time.monotonic()
                    await asyncio.sleep(pause)
                    # Waiting does not count while the process was stopped or its event loop blocked.
                    late = time.monotonic() - asleep - pause
                    self._moved += late
                    if late >= after:
                        blocked = f"the event loop has been blocked for {shown_seconds(late)}"
                        self._warn(f"{blocked}: code that runs on it is waiting or computing.")
                    if self._is_to_end(file):
                        limit.reschedule(asyncio.get_running_loop().time())
                        return
            finally:
                faulthandler.cancel_dump_traceback_later()
                if not self._stacks.stat().st_size:
                    self._stacks.unlink()

    def _is_to_end(self, file: TextIO) -> bool:
        """Warn if nothing has progressed for long. Return whether to end the run."""
        status = snapshot(self._parts, self._since)
        # It changes whenever the run makes progress.
        pulse = (
            status.phase,
            status.epoch,
            status.totals,
            status.journal.committed,
            tuple(sorted(status.rewards.items())),
            tuple(sorted(status.validation.items())),
            tuple((runner.number, runner.node, runner.state) for runner in status.runners),
            tuple((team.since, len(team.nodes)) for team in status.learners),
            tuple((model.name, model.version) for model in status.models),
        )
        if pulse != self._pulse or self._jobs:
            self._pulse = pulse
            self._note_progress()
            return False
        silent, episode = time.monotonic() - self._moved, self._parts.collector.timeout
        ends = self._config.end_after
        if ends is not None:  # A run without an episode timeout is never ended.
            ends = None if episode is None else max(ends, _LEAST_EPISODES * episode)
        is_over = ends is not None and silent >= ends
        if is_over or silent >= self._config.say_after * 2**self._said:
            self._said += 1
            waits = [f"{wait.what} ({shown_seconds(wait.seconds)})" for wait in status.waits]
            listed = "; ".join(waits) or status.phase
            self._diagnosis = f"nothing has moved for {shown_seconds(silent)}; the run waits for {listed}."
            file.write(f"{self._diagnosis}\n{task_stacks()}\n")
            file.flush()
            faulthandler.dump_traceback(file)
            self._warn(self._diagnosis + " The run ends." * is_over)
        return is_over

    def _warn(self, text: str) -> None:
        self._parts.counts.message(f"{text} Stacks: {self._stacks}", warning=True)

    def _note_progress(self) -> None:
        if self._said:
            silent = shown_seconds(time.monotonic() - self._moved)
            self._parts.counts.message(f"the run moves again after {silent}")
        self._moved, self._said = time.monotonic(), 0


def task_stacks() -> str:
    """Return where the tasks of this event loop wait, with counts. `faulthandler` knows only threads."""
    stacks = Counter(_stack(task) for task in asyncio.all_tasks() if task is not asyncio.current_task())
    return "\n".join(f"{count} of these tasks:\n{stack}" for stack, count in stacks.most_common())


def _stack(task: asyncio.Task[Any]) -> str:
    frames: list[tuple[FrameType, int]] = []
    awaited: Any = task.get_coro()
    with contextlib.suppress(AttributeError):  # The innermost awaitable is no coroutine.
        while awaited.cr_frame is not None:
            frames.append((awaited.cr_frame, awaited.cr_frame.f_lineno))
            awaited = awaited.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format())
