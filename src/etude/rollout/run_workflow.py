"""Running a workflow once, so that the user's code gives an output or a failure, in time."""

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.config.import_path import user_frame
from etude.core import threads
from etude.core.data_model import name_type
from etude.core.episode import Failure
from etude.core.errors import EngineError, EnvironmentAway, ImpossibleCall, ToolError, error_words, find_class
from etude.core.json_text import plain
from etude.core.threads import call_in_thread, run_apart, stop_tasks
from etude.rollout.episode import Episode, SyncEpisode
from etude.rollout.reply import Reply
from etude.rollout.workflow import Workflow
from etude.wire.dialect import ERROR_HEADER

_CLIENTS = ("etude", "openai", "anthropic", "langchain_core", "litellm", "pydantic_ai")
"""Libraries whose objects contain answers. Written as JSON, the whole object would be scored as the agent's
answer."""


async def run_workflow(
    workflow: Workflow, episode: Episode, seconds: float | None, longest_call: Callable[[], float]
) -> tuple[Any, Failure | None]:
    """Run the workflow. Returns its output as JSON, or None and the failure.

    `longest_call` returns the seconds of the episode's slowest model call so far. The result comes at most a
    grace period after `seconds`, unless code blocks the event loop. Exceptions of the user's code become
    failures.
    """
    # A thread has its own grace period, after which it is abandoned.
    grace = threads.GRACE_SECONDS * (1 if workflow.is_async else 2)
    task = await run_apart(_call(workflow, episode), seconds, grace)
    if not task.done():
        waited, reason = longest_call(), f"{workflow.where}: no output within {seconds:g} s"
        await stop_tasks({task}, grace)
        if seconds is not None and waited > seconds / 2:
            # Not the agent's failure: a model kept it waiting.
            return None, Failure("timeout", f"{reason}, of which one model call took {waited:.3g} s", "model")
        return None, Failure("timeout", reason)
    if task.cancelled():
        return None, Failure("raised", f"{workflow.where}: CancelledError: the workflow cancelled itself")
    error = task.exception()
    if error is not None:
        return None, make_failure(error)
    try:
        return to_output(task.result()), None
    except NoOutput as error:
        return None, Failure("no_output", f"{workflow.where}: {error}")


@contextlib.contextmanager
def no_exit(whose: str) -> Iterator[None]:
    """Raise RuntimeError instead of errors that would end the program, such as SystemExit."""
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  any other error would end the program
        raise RuntimeError(f"{whose} raised {error_words(error)}").with_traceback(
            error.__traceback__
        ) from None


async def _call(workflow: Workflow, episode: Episode) -> Any:
    """Run an async workflow on this event loop, and any other in a thread."""
    if workflow.is_async:
        with no_exit("the workflow"):
            return await workflow.start(episode.example, episode)
    blocking = SyncEpisode(episode)
    output = await call_in_thread(lambda: workflow.start(episode.example, blocking), episode.loop.close)
    if inspect.iscoroutine(output):
        output.close()
        raise TypeError(f"workflow '{workflow.name}' returned a coroutine; write it with `async def`")
    return output


def make_failure(error: BaseException) -> Failure:
    """Return the failure for an exception of the workflow: `file:line: Type: message`."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # A coroutine cannot raise it: Python raises a RuntimeError instead.
    reason = error_words(error)
    if (frame := user_frame(error)) is not None:
        path, here = Path(frame.filename), Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        reason = f"{path}:{frame.lineno}: {reason}"
    calls = [failed for cause in _causes(error) if (failed := _call_error(cause)) is not None]
    if not calls and any(isinstance(cause, ToolError) for cause in _causes(error)):
        return Failure("tool_failed", reason, "tool")
    if not calls:
        is_away = any(isinstance(cause, EnvironmentAway) for cause in _causes(error))
        return Failure("raised", reason, "environment" if is_away else "agent")
    # A call that no model could answer is the agent's failure.
    is_agents = all(issubclass(failed, ImpossibleCall) for failed in calls)
    return Failure("call_failed", reason, "agent" if is_agents else "model")


def _call_error(error: BaseException) -> type[EngineError] | None:
    """Return the class of the failed call behind an error, or behind an OpenAI client's error."""
    if isinstance(error, EngineError):
        return type(error)
    headers = getattr(getattr(error, "response", None), "headers", None)
    name = headers.get(ERROR_HEADER) if isinstance(headers, Mapping) else None
    return find_class(name, EngineError) if isinstance(name, str) else None


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
        problem = f"{name_type(value)} that was never awaited; write `return await …`"
    elif isinstance(value, Iterator | AsyncIterator):
        problem = f"{name_type(value)} (does it `yield`?); return all of it, as a list or text"
    elif package in _CLIENTS:
        problem = f"{name_type(value)} of {package}; return the text of its answer"
    else:
        return value
    raise NoOutput(f"the workflow returned {problem}")
