"""Running a workflow once: whatever the user's code does comes back as an output or a failure, in time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from etude.core.episode import Failure
from etude.rollout.blocking import SyncEpisode
from etude.rollout.episode import Episode
from etude.rollout.failures import failure_of, user_line
from etude.rollout.loop_watch import BlockedLoop, watch_loop
from etude.rollout.output import NoOutput, output_of
from etude.rollout.threads import call_in_thread
from etude.rollout.workflow import Workflow

GRACE_SECONDS = 1.0
"""How long code that was told to stop may take to clean up, before it is left to itself."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not stop when they were told to; held so that they are not collected half-way."""


async def run_workflow(
    workflow: Workflow, episode: Episode, seconds: float | None, longest_call: Callable[[], float]
) -> tuple[Any, Failure | None]:
    """The output of the workflow as JSON keeps it, or None and why there is none.

    `longest_call` says how many seconds the episode's slowest model call has taken so far.
    Returns at most a grace period after `seconds`, even when the code cannot be stopped.
    Raises nothing that the user's code raises.
    """
    task = asyncio.ensure_future(_call(workflow, episode))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not done:
        waited = longest_call()
        await _stop(task)
        return None, _timeout(workflow, seconds or 0.0, waited)
    if task.cancelled():
        return None, Failure("raised", f"{workflow.where}: CancelledError: the workflow cancelled itself")
    error = task.exception()
    if isinstance(error, BlockedLoop):
        reason = "blocked the event loop; await instead, or write `def` in place of `async def`"
        return None, Failure("timeout", f"{user_line(error)}: {reason}")
    if error is not None:
        return None, failure_of(error)
    return _checked(workflow, task.result())


def _timeout(workflow: Workflow, seconds: float, longest_call: float) -> Failure:
    """The failure of a workflow that took too long: its own, or that of a model that kept it waiting."""
    reason = f"{workflow.where}: no output within {seconds:g} s"
    if longest_call > seconds / 2:
        return Failure("timeout", f"{reason}, of which one model call took {longest_call:.3g} s", "model")
    return Failure("timeout", reason)


def watch_workflows(seconds: float | None) -> contextlib.AbstractContextManager[None]:
    """While this is open, workflows that block the event loop for `seconds` fail; see `watch_loop`."""
    return watch_loop(seconds, _call.__code__)


async def _call(workflow: Workflow, episode: Episode) -> Any:
    try:
        if workflow.is_async:
            return await workflow.fn(episode.example, episode, **workflow.arguments)
        return await _call_in_thread(workflow, episode)
    except SystemExit as error:
        # An agent that calls sys.exit() has failed; it must not end the run.
        told = f"the workflow raised SystemExit: {error}"
        raise RuntimeError(told).with_traceback(error.__traceback__) from None


async def _call_in_thread(workflow: Workflow, episode: Episode) -> Any:
    blocking = SyncEpisode(episode)
    try:
        output = await call_in_thread(lambda: workflow.fn(episode.example, blocking, **workflow.arguments))
    finally:
        blocking.close()
    if inspect.iscoroutine(output):
        output.close()
        raise TypeError(f"workflow '{workflow.name}' returned a coroutine; write it with `async def`")
    return output


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait a little for it to end."""
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=GRACE_SECONDS)
    _abandoned.add(task)
    task.add_done_callback(_forget)
    if not done:
        # The end of the program would wait for it otherwise, maybe for ever.
        asyncio._unregister_task(task)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # Seen: how it ended does not matter any more.


def _checked(workflow: Workflow, returned: Any) -> tuple[Any, Failure | None]:
    try:
        return output_of(returned), None
    except NoOutput as error:
        return None, Failure("no_output", f"{workflow.where}: {error}")
