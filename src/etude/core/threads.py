"""Code that may block or hang: functions in threads, tasks with their context, and a program's event loop."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from typing import Any, ParamSpec, TypeVar

from etude.core.errors import LoopStopped, error_words

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger("etude.tasks")

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not stop when cancelled. Kept so that they are not garbage-collected midway."""

GRACE_SECONDS = 1.0
"""Seconds that code may take to clean up after it was told to stop, before it is abandoned."""
LARGE = 32 * 1024
"""Bytes or characters. Work on more takes a millisecond or longer."""


async def call_in_thread(fn: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Call a function in a daemon thread of its own, in the caller's context, and return its result.

    So a function that hangs blocks neither later calls nor the end of the program. On cancellation it is
    abandoned, after `stop` was called, if given, and a moment. Raises what the function raises, and
    RuntimeError instead of an exception that would end the program.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        result = error = None
        try:
            result = context.run(fn)
        except BaseException as raised:  # noqa: BLE001  user code; raised again where it is awaited
            error = raised
        # The loop may be closed, if the program continued without this thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set_result, (result, error))

    threading.Thread(target=run, name="etude-user-code", daemon=True).start()
    try:
        result, error = await asyncio.shield(done)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
            await asyncio.wait({done}, timeout=GRACE_SECONDS)
        raise
    if error is not None:
        with no_exit("the function"):
            raise error
    return result  # type: ignore[no-any-return]


async def call_any(fn: Callable[..., Any]) -> Any:
    """Return the result of an async function called here, or of another one called in a thread, where it may
    run its own event loop."""
    result = fn() if inspect.iscoroutinefunction(fn) else await call_in_thread(fn)
    return await result if inspect.isawaitable(result) else result


async def call_off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, run in a thread if `size`, the size of its input, is large."""
    return work(*args, **kwargs) if size < LARGE else await asyncio.to_thread(work, *args, **kwargs)


async def run_apart(work: Coroutine[Any, Any, T], seconds: float | None, grace: float) -> asyncio.Task[T]:
    """Run user code in a task, so that it can cancel only itself. Return the task, which has ended unless it
    took longer than `seconds`. If the caller is cancelled, it is stopped."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await stop_tasks({task}, grace)
        raise
    return task


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until all have ended, however they end. Use `stop_tasks` for user code."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def stop_tasks(tasks: set[asyncio.Task[Any]], grace: float) -> set[asyncio.Task[Any]]:
    """Cancel the tasks and wait briefly for their ends. Abandon and return those that do not stop."""
    for task in tasks:
        task.cancel()
        _abandoned.add(task)
        task.add_done_callback(_forget)
    stuck = (await asyncio.wait(tasks, timeout=grace))[1] if tasks else set()
    for task in stuck:
        asyncio._unregister_task(task)
    return stuck


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # Otherwise Python would report that nobody retrieved it.


@contextlib.contextmanager
def no_exit(whose: str, kind: type[BaseException] = BaseException) -> Iterator[None]:
    """Raise RuntimeError instead of errors of this kind that would end more than the block: a SystemExit, or
    a CancelledError where nobody cancels the task."""
    try:
        yield
    except kind as error:
        task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
        if isinstance(error, Exception | GeneratorExit) or (task is not None and task.cancelling()):
            raise
        raise RuntimeError(f"{whose} raised {error_words(error)}").with_traceback(
            error.__traceback__
        ) from None


@contextlib.contextmanager
def set_value(variable: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    """Set a context variable for the block and the tasks it starts."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@no_exit("a part of the run", SystemExit)
def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new event loop and return its result, whatever user code does to the loop.

    A task that does not stop at the end is abandoned, and a warning names it. Raises LoopStopped if code in
    this process stopped the loop or cancelled the work.
    """
    failures: list[BaseException] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(_warn)
        try:
            return await work
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
            for name, count in Counter(map(_describe, await stop_tasks(others, GRACE_SECONDS))).items():
                _LOG.warning(
                    "%s was still running at the end and did not stop when cancelled (%d of them). It is "
                    "abandoned; let the code that starts it end it too",
                    name,
                    count,
                )

    try:
        return asyncio.run(main())
    except (asyncio.CancelledError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and error in failures:
            raise
        raise LoopStopped(
            "something in this process has stopped the event loop or cancelled the work of the run. An agent "
            "or evaluator that runs here can do that; with `-o eval.general.isolation=process` it can only "
            "end its own process. Finished work is kept, and `etude resume` continues from it"
        ) from error


def _warn(_: asyncio.AbstractEventLoop, problem: dict[str, Any]) -> None:
    """Log in one line what Python logs with a traceback, such as the error of a task that nobody awaits."""
    error = problem.get("exception")
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    _LOG.warning("%s: %s%s", problem["message"], place, "" if error is None else error_words(error))


def _describe(task: asyncio.Task[Any]) -> str:
    name = f"the task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
    frames = task.get_stack()
    return f"{name} at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else name


def blocking(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a coroutine function blocking. It uses a separate thread if an event loop runs already."""

    @functools.wraps(work)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_loop(work(*args, **kwargs))
        return _run_in_thread(work(*args, **kwargs))

    return wait


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread and return its result. Ctrl-C cancels it and waits for its end."""
    waiting = asyncio.current_task()
    started: futures.Future[tuple[asyncio.AbstractEventLoop, Any]] = futures.Future()

    async def main() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with futures.ThreadPoolExecutor(1, thread_name_prefix="etude") as executor:
        future = executor.submit(contextvars.copy_context().run, run_loop, main())
        try:
            while not futures.wait([future], 0.2).done:
                # `asyncio.run` turns a first Ctrl-C into a cancellation; a blocking wait would not notice.
                if waiting is not None and waiting.cancelling():
                    raise asyncio.CancelledError
        except (KeyboardInterrupt, asyncio.CancelledError):
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise
        return future.result()
