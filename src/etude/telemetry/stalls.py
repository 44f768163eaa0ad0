"""The stall doctor: when nothing in a run moves, it says what the run waits for, and ends it at last.

It looks at what any progress leaves behind: events, entries of the journal, tokens, versions, and what
training jobs say of themselves. A thread looks whether the event loop itself still turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from etude.config.schema import StallConfig
from etude.core.errors import EtudeError, StalledError, StoreError, first_line
from etude.core.stats import shown_seconds
from etude.store.files import write_atomically
from etude.store.status import RunStatus
from etude.telemetry.snapshot import Parts, snapshot
from etude.telemetry.stacks import all_stacks

FOLDER = "stalls"
"""In the run folder: a file for each time that nothing moved."""

_LOOKS = 20
"""In the time after which something is said."""
_MOST_FILES = 20
_ANSWER_SECONDS = 30.0
"""For a backend to say how a job stands."""
_LEAST_EPISODES = 2.0
"""A run is not ended for want of progress before so many times the seconds that an episode may take."""

Ask = Callable[[], Awaitable[object]]


class StallDoctor:
    """Watches a run. `jobs` that it waits for are asked how they stand before anything is said of them."""

    def __init__(self, parts: Parts, config: StallConfig) -> None:
        self._parts = parts
        self._config = config
        self._since = time.time()
        self._jobs: dict[str, tuple[float, Ask]] = {}
        self._job_states: dict[str, object] = {}
        self._pulse: object = None
        self._moved = self._turned = time.monotonic()
        self._said = 0
        """How often since something moved."""
        self._diagnosis = ""

    @contextmanager
    def waiting_for_job(self, name: str, seconds: float, ask: Ask) -> Iterator[None]:
        """A training job is waited for in the block, for so many seconds; `ask` gives how it stands."""
        self._jobs[name] = seconds, ask
        try:
            yield
        finally:
            self._jobs.pop(name, None)
            self._job_states.pop(name, None)
            self._progressed()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block goes on. Raises StalledError when it is ended, for want of any progress."""
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch_loop, args=(asyncio.get_running_loop(), over), name="etude-stalls", daemon=True
        )
        thread.start()
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
                f"{self._diagnosis} The run has ended, and nothing that is journalled is lost: mend what it "
                "waited for and resume it; `stall.end_after` is how long it waits"
            ) from error
        finally:
            over.set()

    @property
    def _pause(self) -> float:
        return self._config.say_after / _LOOKS

    async def _look(self, limit: asyncio.Timeout) -> None:
        """Look again and again; the limit is over when the run is to end."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(self._pause)
            self._turned = time.monotonic()
            # A stopped process waits for nothing; of a blocked loop `_watch_loop` tells.
            self._moved += self._turned - asleep - self._pause
            status = snapshot(self._parts, self._since)
            pulse = _pulse_of(status)
            if pulse != self._pulse:
                self._pulse = pulse
                self._progressed()
                continue
            silent = time.monotonic() - self._moved
            if silent >= self._config.say_after / 2 and self._jobs.keys() - self._job_states.keys():
                await self._do_jobs_move()  # To have something that a later answer can differ from.
            ends = self._ends_after() if not self._jobs else None
            if ends is not None and silent >= ends:
                self._diagnosis = self._sentence(silent, status)
                await self._say(status, " The run ends.")
                limit.reschedule(asyncio.get_running_loop().time())
                return
            if silent >= self._config.say_after * 2**self._said and not await self._do_jobs_move():
                self._said += 1
                self._diagnosis = self._sentence(silent, status)
                await self._say(status, self._outlook(status, ends))

    def _progressed(self) -> None:
        if self._said:
            silent = shown_seconds(time.monotonic() - self._moved)
            self._parts.counts.message(f"something moves again, after {silent}")
        self._moved, self._said = time.monotonic(), 0

    async def _do_jobs_move(self) -> bool:
        """Whether a job that is waited for says other things of itself than when it was asked last."""
        moving = False
        for name, (_, ask) in list(self._jobs.items()):
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    state: object = await ask()
            except (EtudeError, TimeoutError) as error:
                state = f"no answer ({first_line(error) or 'none in time'})"
            if name in self._jobs and self._job_states.get(name) != state:
                moving = moving or name in self._job_states
                self._job_states[name] = state
        if moving:
            self._progressed()
        return moving

    def _ends_after(self) -> float | None:
        """Seconds without progress that end the run; None for a run that is never ended so."""
        episode = self._parts.collector.timeout
        if self._config.end_after is None or episode is None:
            return None
        return max(self._config.end_after, _LEAST_EPISODES * episode)

    def _sentence(self, silent: float, status: RunStatus) -> str:
        waits = [f"{wait.what} ({shown_seconds(wait.seconds)})" for wait in status.waits]
        waits += [
            f"job {name}, which says: {_shown(self._job_states.get(name, 'nothing'))}" for name in self._jobs
        ]
        listed = "; ".join(waits) or status.phase
        return f"nothing has moved for {shown_seconds(silent)}; the run waits for {listed}."

    def _outlook(self, status: RunStatus, ends: float | None) -> str:
        """When the waiting ends, if nothing else ends it."""
        bounds = []
        episode = self._parts.collector.timeout
        if status.playing and episode is not None:
            bounds.append(f"an episode after {shown_seconds(episode)} (eval.general.timeout)")
        bounds += [f"job {name} after {shown_seconds(limit)}" for name, (limit, _) in self._jobs.items()]
        if ends is not None:
            bounds.append(f"the run {shown_seconds(ends)} after the last progress (stall.end_after)")
        return f" At the latest there ends {', '.join(bounds)}." if bounds else ""

    async def _say(self, status: RunStatus, outlook: str) -> None:
        text = "\n\n".join([self._diagnosis, status.model_dump_json(indent=1), all_stacks(_tasks())])
        path = await asyncio.to_thread(self._keep, text)
        where = f" Stacks: {path}" if path is not None else ""
        self._parts.counts.message(f"{self._diagnosis}{outlook}{where}", warning=True)

    def _keep(self, text: str) -> Path | None:
        """Write a report, unless there are many already, or the disk refuses."""
        folder = self._parts.run.path / FOLDER
        number = len(list(folder.glob("*.txt"))) + 1
        if number > _MOST_FILES:
            return None
        path = folder / f"{number}.txt"
        with contextlib.suppress(StoreError):
            write_atomically(path, text + "\n")
            return path
        return None

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
        """In a thread: say when the event loop has not turned for as long as something should have moved."""
        warnings, silent, seen = 0, 0.0, self._turned
        while not over.wait(self._pause):
            # Counted in pauses and not by the clock: a stopped process is no blocked loop.
            silent = silent + self._pause if self._turned == seen else 0.0
            seen = self._turned
            if silent < self._config.say_after:
                warnings = 0
            elif silent >= self._config.say_after * 2**warnings:
                warnings += 1
                blocked = f"the event loop has been blocked for {shown_seconds(silent)}"
                words = f"{blocked}: code that runs on it waits or computes."
                path = self._keep(f"{words}\n\n{all_stacks([])}")
                where = f" Stacks: {path}" if path is not None else ""
                self._parts.counts.message(f"{words}{where}", warning=True)


def _tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _pulse_of(status: RunStatus) -> object:
    """A value that is another one whenever the run has come on."""
    return (
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


def _shown(state: object) -> str:
    status, progress, message = (getattr(state, name, None) for name in ("status", "progress", "message"))
    if status is None:
        return str(state)
    words = [str(status), "" if progress is None else f"{progress:.0f} %", str(message or "")]
    return ", ".join(word for word in words if word)
