"""Running functions without asyncio, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 10.0
_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The job queues of threads that have nothing to do; a thread that is not used for a while ends."""


async def call_in_thread(fn: Callable[[], T]) -> T:
    """The result of `fn`, run in a daemon thread with the caller's context.

    Unlike in an executor there are as many threads as there are calls at once, and they are daemons:
    a function that hangs holds up neither the calls after it nor the end of the program. When this is
    cancelled, the thread is left to itself.

    Raises what `fn` raises, and RuntimeError for what would end the program.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: tuple[T | None, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def job() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(fn), None
        except BaseException as error:  # noqa: BLE001  user code; raised again where it is awaited
            outcome = None, error
        # The loop is closed when the program has gone on without this thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    _take_thread().put(job)
    result, error = await done
    if error is not None and (isinstance(error, StopIteration) or not isinstance(error, Exception)):
        # Raised there it means that code, not the program; and no future can hold a StopIteration.
        told = f"the function raised {type(error).__name__}: {error}"
        raise RuntimeError(told).with_traceback(error.__traceback__)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _take_thread() -> SimpleQueue[Callable[[], None]]:
    """The job queue of an idle thread, or of a new one."""
    with contextlib.suppress(IndexError):
        return _idle.pop()
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name="etude-user-code", daemon=True).start()
    return queue


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            job = queue.get(timeout=_IDLE_SECONDS)
        except Empty:
            try:
                _idle.remove(queue)
            except ValueError:
                continue  # The queue was taken this moment: a job is on its way.
            return
        job()
        del job  # Or it would keep its arguments alive until the next one.
        _idle.append(queue)
