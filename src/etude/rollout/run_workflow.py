"""Running a workflow once: whatever the user's code does comes back as an output or a failure, in time."""

import asyncio
import contextlib
import inspect
import json
import sysconfig
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.core import threads
from etude.core.data_model import kind_of
from etude.core.episode import Failure
from etude.core.errors import EngineError, EnvironmentAway, ImpossibleCall, ToolError, words_of
from etude.core.threads import call_in_thread
from etude.rollout.episode import Episode, SyncEpisode
from etude.rollout.reply import Reply
from etude.rollout.workflow import Workflow
from etude.store.plain import plain
from etude.wire.dialect import ERROR_HEADER

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not stop when they were told to; held so that they are not collected half-way."""

_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)

_CLIENTS = ("etude", "openai", "anthropic", "langchain_core", "litellm", "pydantic_ai")
"""Libraries whose objects are answers, or what stands around them: as JSON they would be scored as if
they were what the agent says."""


async def run_workflow(
    workflow: Workflow, episode: Episode, seconds: float | None, longest_call: Callable[[], float]
) -> tuple[Any, Failure | None]:
    """The output of the workflow as JSON keeps it, or None and why there is none.

    `longest_call` says how many seconds the episode's slowest model call has taken so far. Returns at most a
    grace period after `seconds`, unless code blocks the event loop. Raises nothing that the user's code
    raises where that is awaited.
    """
    # A thread has its own grace, after which it is left to itself.
    grace = threads.GRACE_SECONDS * (1 if workflow.is_async else 2)
    task = asyncio.ensure_future(_call(workflow, episode))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, grace)
        raise
    if not done:
        waited, reason = longest_call(), f"{workflow.where}: no output within {seconds:g} s"
        await _stop(task, grace)
        if seconds is not None and waited > seconds / 2:
            # Not the agent's own failure: a model kept it waiting.
            return None, Failure("timeout", f"{reason}, of which one model call took {waited:.3g} s", "model")
        return None, Failure("timeout", reason)
    if task.cancelled():
        return None, Failure("raised", f"{workflow.where}: CancelledError: the workflow cancelled itself")
    error = task.exception()
    if error is not None:
        return None, failure_of(error)
    try:
        return output_of(task.result()), None
    except NoOutput as error:
        return None, Failure("no_output", f"{workflow.where}: {error}")


@contextlib.contextmanager
def no_exit(whose: str) -> Iterator[None]:
    """Within the block RuntimeError is raised in place of what would end the program, such as SystemExit."""
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  all that is left would end the program
        raise RuntimeError(f"{whose} raised {words_of(error)}").with_traceback(error.__traceback__) from None


async def _call(workflow: Workflow, episode: Episode) -> Any:
    """Run an async workflow on this event loop, and another in a thread."""
    if workflow.is_async:
        with no_exit("the workflow"):
            return await workflow.fn(episode.example, episode, **workflow.arguments)
    blocking = SyncEpisode(episode)
    output = await call_in_thread(
        lambda: workflow.fn(episode.example, blocking, **workflow.arguments), episode.loop.close
    )
    if inspect.iscoroutine(output):
        output.close()
        raise TypeError(f"workflow '{workflow.name}' returned a coroutine; write it with `async def`")
    return output


async def _stop(task: asyncio.Task[Any], grace: float) -> None:
    """Cancel the task and wait a little for it to end."""
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=grace)
    _abandoned.add(task)
    task.add_done_callback(_forget)
    if not done:
        # The end of the program would wait for it otherwise, maybe for ever.
        asyncio._unregister_task(task)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # Seen: how it ended does not matter any more.


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception of the workflow stands for: `file:line: Type: message`."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # A coroutine cannot raise it: Python puts a RuntimeError in its place.
    where, words = user_line(error), words_of(error)
    reason = f"{where}: {words}" if where else words
    calls = [failed for cause in _causes(error) if (failed := _call_error(cause)) is not None]
    if not calls and any(isinstance(cause, ToolError) for cause in _causes(error)):
        return Failure("tool_failed", reason, "tool")
    if not calls:
        is_away = any(isinstance(cause, EnvironmentAway) for cause in _causes(error))
        return Failure("raised", reason, "environment" if is_away else "agent")
    # What no model could answer is the agent's own failure.
    is_agents = all(issubclass(failed, ImpossibleCall) for failed in calls)
    return Failure("call_failed", reason, "agent" if is_agents else "model")


def _call_error(error: BaseException) -> type[EngineError] | None:
    """The class of the failed call that an error is, or that an OpenAI client's error stands for."""
    if isinstance(error, EngineError):
        return type(error)
    headers = getattr(getattr(error, "response", None), "headers", None)
    name = headers.get(ERROR_HEADER) if isinstance(headers, Mapping) else None
    return next((kind for kind in _with_subclasses(EngineError) if kind.__name__ == name), None)


def _with_subclasses(kind: type[EngineError]) -> Iterator[type[EngineError]]:
    """The class and all that inherit from it, those of an engine of the user's own among them."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and the errors inside exception groups."""
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


def user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost line that is neither ours nor a library's, else of the innermost."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    for frame in own or frames:
        path = Path(frame.filename)
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{here}:{frame.lineno}"
    return None


class NoOutput(Exception):
    """A workflow returned something that is no output; the message says what to return instead."""


def output_of(returned: Any) -> Any:
    """`returned` as JSON keeps it; of a `Reply` its text.

    Raises NoOutput for what cannot be kept and for what was surely not meant.
    """
    if returned is None:
        raise NoOutput("the workflow returned None; return its answer")
    try:
        output = plain(_meant(returned))
        json.dumps(output)
    except NoOutput:
        raise
    except RecursionError as error:
        raise NoOutput("the output holds itself, or is too deep to be kept; return something flat") from error
    except Exception as error:
        raise NoOutput(
            f"the output cannot be kept: {error or type(error).__name__}; "
            "return text, numbers, lists or dicts"
        ) from error
    return output


def _meant(value: Any) -> Any:
    """The value with the text of each `Reply` in its place. Raises NoOutput for what is no output."""
    if isinstance(value, Reply):
        if value.tool_calls and not value.text:
            names = ", ".join(call.name for call in value.tool_calls)
            raise NoOutput(
                f"the workflow returned a Reply without text that calls tools ({names}); call them and ask "
                "again, or return `reply.message` if the calls are the answer"
            )
        return value.text
    if isinstance(value, Mapping):
        return {key: _meant(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_meant(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    package = type(value).__module__.partition(".")[0]
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # Or Python would warn that nobody awaited it.
        problem = f"{kind_of(value)} that nobody awaited; write `return await …`"
    elif isinstance(value, Iterator | AsyncIterator):
        problem = f"{kind_of(value)} (does it `yield`?); return all of it, as a list or text"
    elif package in _CLIENTS:
        problem = f"{kind_of(value)} of {package}; return the text of the answer in it"
    else:
        return value
    raise NoOutput(f"the workflow returned {problem}")
