"""The collector: runs the workflow over many examples at once, and records each run."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.core.call import Sampling
from etude.core.episode import EpisodeRecord, Example, LoggedExample, ToolSet
from etude.core.interfaces import Engine
from etude.rollout.episode import Episode
from etude.rollout.recorder import Models, Recorder
from etude.rollout.run_workflow import run_workflow
from etude.rollout.workflow import Workflow
from etude.store.episodes import encode_episode, read_episode, write_episode
from etude.store.journal import Steps
from etude.wire.endpoint import EndpointServer
from etude.wire.sampling import change_sampling

_SETTLE_SECONDS = 30.0
"""Seconds to wait for calls under way before an orderly stop of a run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for episodes."""

    max_concurrency: int = 8
    """Episodes that run at the same time."""
    timeout: float | None = 300.0
    """Seconds per episode. A workflow's own timeout overrides it."""
    max_calls: int | None = 1000
    """Model calls per episode."""


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """An episode to run."""

    id: str
    """Unique within the run. A finished episode with this id is read back and not run again."""
    example: Example
    generation: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Sampling` that override the agent's for all calls: `{"temperature": 0}`."""
    logged: LoggedExample | None = None
    """The example if the episode was played before, and only needs to be read."""
    widths: Any = None
    """The answers sampled for each turn of a protocol, as JSON; None leaves this to the workflow."""

    def __post_init__(self) -> None:
        """Raise RequestError for an unknown field or an impossible value."""
        change_sampling(Sampling(), self.sampling)


class Runner(Protocol):
    """Plays episodes in other processes, and has their scores computed there too."""

    async def play(self, job: EpisodeJob) -> EpisodeRecord:
        """Return the finished episode of a job, journalled with its scores. Raises StoreError."""


class Collector:
    """Runs a workflow on examples and returns one finished episode at a time."""

    def __init__(
        self,
        workflow: Workflow,
        models: Mapping[str, Engine],
        journal: Steps,
        *,
        seed: int = 0,
        limits: Limits | None = None,
        sampling: Mapping[str, Sampling] | None = None,
        default_model: str | None = None,
        template_options: Mapping[str, Mapping[str, Any]] | None = None,
        tools: Mapping[str, ToolSet] | None = None,
        runner: Runner | None = None,
    ) -> None:
        """Set up a collection of episodes, played by `runner` if given, else here.

        `sampling` and `template_options` are the models' defaults, `default_model` answers calls that name no
        model. `tools` are for `episode.tools`, by name. Raises RequestError if the workflow or the models do
        not fit.
        """
        workflow.check(complete=True)
        self.workflow = workflow
        self.limits = limits or Limits()
        self.timeout = self.limits.timeout if workflow.timeout is None else workflow.timeout
        self._runner = runner
        self._tools = dict(tools or {})
        self._models = Models(models, sampling or {}, default_model, template_options or {})
        self._journal = journal
        self._seed = seed
        self._server = EndpointServer()
        self._collections = 0
        self.playing: dict[str, float] = {}
        """The episodes played here, and their start times by the monotonic clock."""

    def calls_under_way(self) -> dict[str, tuple[int, float]]:
        """Return the number of calls waiting for an answer, and the oldest one's age in seconds, by model."""
        now, waiting = time.monotonic(), defaultdict[str, list[float]](list)
        for model, since in self._models.under_way.values():
            waiting[model].append(now - since)
        return {model: (len(ages), max(ages)) for model, ages in waiting.items()}

    @asynccontextmanager
    async def wait_for_calls(self) -> AsyncIterator[None]:
        """Wait for the answers to calls under way, which are paid for. No call begins before the block ends.

        Enter it before you stop a collection, and leave it when its episodes are cancelled.
        """
        waiting, deadline = object(), time.monotonic() + _SETTLE_SECONDS
        self._models.settling.add(waiting)
        try:
            while self._models.under_way and time.monotonic() < deadline:  # noqa: ASYNC110  in threads too
                await asyncio.sleep(0.02)
            yield
        finally:
            self._models.settling.discard(waiting)

    async def collect(self, jobs: Iterable[EpisodeJob]) -> AsyncGenerator[EpisodeRecord]:
        """Run the jobs, and yield each episode when it is finished and journalled.

        A job is taken from the iterable only when there is room for it, and episodes wait for their consumer,
        so memory stays flat. Failed episodes are yielded too: a failure is data. Leaving the loop early or
        cancelling stops the episodes under way, but keeps their calls for the next run. Use
        `contextlib.aclosing` when you break out. Raises StoreError if the journal cannot be written.
        """
        waiting = iter(jobs)
        finished: asyncio.Queue[EpisodeRecord | BaseException | None] = asyncio.Queue(
            self.limits.max_concurrency
        )
        self._collections += 1
        stop = AsyncExitStack()
        workers = [
            asyncio.ensure_future(self._work(waiting, finished)) for _ in range(self.limits.max_concurrency)
        ]
        try:
            working = len(workers)
            while working:
                outcome = await finished.get()
                if outcome is None:
                    working -= 1
                elif isinstance(outcome, BaseException):
                    await stop.enter_async_context(self.wait_for_calls())
                    raise outcome
                else:
                    yield outcome
        finally:
            for worker in workers:
                worker.cancel()
            try:
                await asyncio.gather(*workers, return_exceptions=True)
            finally:
                # Even when cancelled a second time, while the workers stop.
                await stop.aclose()
                self._collections -= 1
                if not self._collections:
                    await self.close()

    async def close(self) -> None:
        """Close the server of `episode.endpoint`. The next episode that needs it opens it again."""
        await self._server.close()

    async def run(self, job: EpisodeJob) -> EpisodeRecord:
        """Return the finished episode of a job, read from the journal or run and journalled.

        Raises StoreError if the journal cannot be read or written.
        """
        stored = read_episode(self._journal, job.id, job.example)
        if stored is not None:
            return stored
        recorder = Recorder(
            job.id,
            self._models,
            self._journal,
            seed=self._seed,
            override=job.sampling,
            max_calls=self.limits.max_calls,
        )
        # A copy: an agent that changes its inputs must not affect the example's other episodes.
        example = job.example.copied()
        episode = Episode(
            example, job.generation, recorder, seed=self._seed, server=self._server, tools=self._tools
        )
        episode.widths = job.widths
        started = time.perf_counter()
        self.playing[job.id] = time.monotonic()
        try:
            output, failure = await run_workflow(self.workflow, episode, self.timeout, recorder.longest_call)
        finally:
            del self.playing[job.id]
            await episode.close()
        if recorder.fatal is not None:
            raise recorder.fatal
        record = EpisodeRecord(
            id=job.id,
            example=job.example,
            generation=job.generation,
            calls=recorder.calls(),
            events=episode.events,
            output=output,
            failure=failure,
            seconds=time.perf_counter() - started,
        )
        await self._journal.put(job.id, encode_episode(record, recorder.names))
        return record

    async def _work(
        self, waiting: Iterator[EpisodeJob], finished: asyncio.Queue[EpisodeRecord | BaseException | None]
    ) -> None:
        """Run jobs until there are none, then put None into the queue. An error ends the collection."""
        play = self.run if self._runner is None else self._runner.play
        try:
            for job in waiting:
                if job.logged is not None and self._journal.get(job.id) is None:
                    model = self._models.choose(None)
                    await write_episode(self._journal, job.logged.played(job.id, job.generation, model))
                await finished.put(await play(job))
        except Exception as error:  # noqa: BLE001  the jobs are the caller's code; `collect` raises it
            await finished.put(error)
        else:
            await finished.put(None)
