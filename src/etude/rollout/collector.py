"""The collector: runs the workflow over many examples at once, and records each run.

The user's code gives an output or a failure, in time.
"""

import asyncio
import inspect
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from etude.config.import_path import user_frame
from etude.core import threads
from etude.core.call import Sampling
from etude.core.data_model import name_type
from etude.core.episode import EpisodeRecord, Example, Failure, LoggedExample, ToolSet
from etude.core.errors import EngineError, EnvironmentAway, ImpossibleCall, ToolError, error_words, find_class
from etude.core.interfaces import Engine
from etude.core.json_text import plain
from etude.core.threads import call_in_thread, end_tasks, no_exit, run_apart, stop_tasks
from etude.rollout.episode import Episode, SyncEpisode
from etude.rollout.recorder import Models, Recorder, Reply
from etude.rollout.workflow import Workflow
from etude.store.episodes import encode_episode, read_episode, write_episode
from etude.store.journal import Steps
from etude.wire.dialect import ERROR_HEADER
from etude.wire.http_server import EndpointServer
from etude.wire.request_body import change_sampling


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


@dataclass(eq=False)
class Collector:
    """Runs a workflow on examples and returns one finished episode at a time.

    Raises RequestError if the workflow or the models do not fit.
    """

    workflow: Workflow
    models: Mapping[str, Engine]
    journal: Steps
    seed: int = 0
    limits: Limits = Limits()
    sampling: Mapping[str, Sampling] = field(default_factory=dict)
    """The models' defaults, as are `template_options`."""
    default_model: str | None = None
    """Answers calls that name no model."""
    template_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tools: Mapping[str, ToolSet] = field(default_factory=dict)
    """The sets of `episode.tools`, by name."""
    runner: Runner | None = None
    """Plays the episodes, if given."""
    playing: dict[str, float] = field(default_factory=dict)
    """The episodes played here, and their start times by the monotonic clock."""

    def __post_init__(self) -> None:
        self.workflow.check(complete=True)
        self.timeout = self.limits.timeout if self.workflow.timeout is None else self.workflow.timeout
        self._models = Models(self.models, self.sampling, self.default_model, self.template_options)
        self._server = EndpointServer()
        self._collections = 0

    def calls_under_way(self) -> dict[str, tuple[int, float]]:
        """Return the number of calls waiting for an answer, and the oldest one's age in seconds, by model."""
        now, waiting = time.monotonic(), defaultdict[str, list[float]](list)
        for model, since in self._models.under_way.values():
            waiting[model].append(now - since)
        return {model: (len(ages), max(ages)) for model, ages in waiting.items()}

    @asynccontextmanager
    async def wait_for_calls(self) -> AsyncIterator[None]:
        """Wait up to 30 s for the calls under way, which are paid for. No call begins before the block ends.

        Enter it before you stop a collection, and leave it when its episodes are cancelled.
        """
        waiting, deadline = object(), time.monotonic() + 30.0
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
            try:
                await end_tasks(*workers)
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
        stored = read_episode(self.journal, job.id, job.example)
        if stored is not None:
            return stored
        recorder = Recorder(
            job.id,
            self._models,
            self.journal,
            seed=self.seed,
            override=job.sampling,
            max_calls=self.limits.max_calls,
        )
        # A copy: an agent that changes its inputs must not affect the example's other episodes.
        example = job.example.copy()
        episode = Episode(
            example, job.generation, recorder, seed=self.seed, server=self._server, tools=self.tools
        )
        episode.widths = job.widths
        started = time.perf_counter()
        self.playing[job.id] = time.monotonic()
        try:
            output, failure = await self._run_workflow(episode, recorder)
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
        await self.journal.put(job.id, encode_episode(record, recorder.names))
        return record

    async def _run_workflow(self, episode: Episode, recorder: Recorder) -> tuple[Any, Failure | None]:
        """Run the workflow. Returns its output as JSON, or None and the failure.

        The result comes at most a grace period after the timeout, unless code blocks the event loop.
        """
        workflow, seconds = self.workflow, self.timeout

        async def call() -> Any:
            if workflow.is_async:
                with no_exit("the workflow"):
                    return to_output(await workflow.start(episode.example, episode))
            blocking = SyncEpisode(episode)
            output = await call_in_thread(
                lambda: workflow.start(episode.example, blocking), episode.loop.close
            )
            return to_output(output)

        # A thread has its own grace period, after which it is abandoned.
        grace = threads.GRACE_SECONDS * (1 if workflow.is_async else 2)
        task = await run_apart(call(), seconds, grace)
        if not task.done():
            waited, reason = recorder.longest_call(), f"{workflow.where}: no output within {seconds:g} s"
            await stop_tasks({task}, grace)
            if seconds is not None and waited > seconds / 2:
                # Not the agent's failure: a model kept it waiting.
                return None, Failure(
                    "timeout", f"{reason}, of which one model call took {waited:.3g} s", "model"
                )
            return None, Failure("timeout", reason)
        if task.cancelled():
            return None, Failure("raised", f"{workflow.where}: CancelledError: the workflow cancelled itself")
        error = task.exception()
        if isinstance(error, NoOutput):
            return None, Failure("no_output", f"{workflow.where}: {error}")
        return (task.result(), None) if error is None else (None, make_failure(error))

    async def _work(
        self, waiting: Iterator[EpisodeJob], finished: asyncio.Queue[EpisodeRecord | BaseException | None]
    ) -> None:
        """Run jobs until there are none, then put None into the queue. An error ends the collection."""
        play = self.run if self.runner is None else self.runner.play
        try:
            for job in waiting:
                if job.logged is not None and self.journal.get(job.id) is None:
                    model = self._models.choose(None)
                    await write_episode(self.journal, job.logged.make_record(job.id, job.generation, model))
                await finished.put(await play(job))
        except Exception as error:  # noqa: BLE001  the jobs are the caller's code; `collect` raises it
            await finished.put(error)
        else:
            await finished.put(None)


_CLIENTS = ("etude", "openai", "anthropic", "langchain_core", "litellm", "pydantic_ai")
"""Libraries whose objects contain answers. As JSON, the whole object would be scored as the answer."""


def make_failure(error: BaseException) -> Failure:
    """Return the failure for an exception of the workflow: `file:line: Type: message`."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # A coroutine cannot raise it: Python raises a RuntimeError instead.
    reason = error_words(error)
    if (frame := user_frame(error)) is not None:
        path, here = Path(frame.filename), Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        reason = f"{path}:{frame.lineno}: {reason}"
    calls: list[type[EngineError]] = []
    causes = list(_causes(error))
    for cause in causes:
        # A failed call raises its own error, or an OpenAI client's error with the class in a header.
        headers = getattr(getattr(cause, "response", None), "headers", None)
        name = headers.get(ERROR_HEADER) if isinstance(headers, Mapping) else None
        found = type(cause) if isinstance(cause, EngineError) else find_class(str(name), EngineError)
        calls += [] if found is None else [found]
    if calls:
        # A call that no model could answer is the agent's failure.
        is_agents = all(issubclass(failed, ImpossibleCall) for failed in calls)
        return Failure("call_failed", reason, "agent" if is_agents else "model")
    if any(isinstance(cause, ToolError) for cause in causes):
        return Failure("tool_failed", reason, "tool")
    is_away = any(isinstance(cause, EnvironmentAway) for cause in causes)
    return Failure("raised", reason, "environment" if is_away else "agent")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and the errors inside exception groups."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        pending.append(cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__))
        if isinstance(cause, BaseExceptionGroup):
            pending.extend(cause.exceptions)


class NoOutput(Exception):
    """A workflow's return value is not an output. The message says what to return instead."""


def to_output(returned: Any) -> Any:
    """Return a workflow's return value as JSON; for a `Reply`, its text.

    Raises NoOutput for values that cannot be stored, or that are surely a mistake.
    """
    if returned is None:
        raise NoOutput("the workflow returned None; return its answer")
    try:
        output = plain(_replace_replies(returned))
        json.dumps(output)
    except NoOutput:
        raise
    except RecursionError as error:
        raise NoOutput("the output contains itself or is too deep; return something flat") from error
    except Exception as error:
        raise NoOutput(
            f"the output cannot be stored: {error or type(error).__name__}; "
            "return text, numbers, lists or dicts"
        ) from error
    return output


def _replace_replies(value: Any) -> Any:
    """Replace each `Reply` in the value by its text. Raises NoOutput for a value that is not an output."""
    if isinstance(value, Reply):
        if value.tool_calls and not value.text:
            names = ", ".join(call.name for call in value.tool_calls)
            raise NoOutput(
                f"the workflow returned a Reply without text that calls tools ({names}); call them and ask "
                "again, or return `reply.message` if the calls are the answer"
            )
        return value.text
    if isinstance(value, Mapping):
        return {key: _replace_replies(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_replies(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    package = type(value).__module__.partition(".")[0]
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # Otherwise Python would warn that nobody awaited it.
        problem = f"{name_type(value)} that was never awaited; write it with `async def` and `return await …`"
    elif isinstance(value, Iterator | AsyncIterator):
        problem = f"{name_type(value)} (does it `yield`?); return all of it, as a list or text"
    elif package in _CLIENTS:
        problem = f"{name_type(value)} of {package}; return the text of its answer"
    else:
        return value
    raise NoOutput(f"the workflow returned {problem}")
