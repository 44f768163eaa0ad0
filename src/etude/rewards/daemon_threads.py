"""Threads for blocking user code that may never come back."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class DaemonThreads:
    """Runs functions in daemon threads, as many as there are calls at once.

    Unlike in an executor, a function that hangs holds up neither the calls after it nor the end of
    the program.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    async def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What `fn(*args, **kwargs)` returns or raises. Cancelling leaves the thread to itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            result, error = None, None
            try:
                result = context.run(fn, *args, **kwargs)
            except BaseException as raised:  # noqa: BLE001 - user code; the caller gets it, whatever it is
                error = raised
            # When the loop was closed meanwhile, nobody is left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._take_thread().put(job)
        return await future

    def _take_thread(self) -> SimpleQueue[Callable[[], None]]:
        """The job queue of an idle thread, or of a new one."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, args=(queue,), name="etude-user-code", daemon=True).start()
        return queue

    def _work(self, queue: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                job = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(queue)
                except ValueError:
                    continue  # The queue was taken this moment: a job is on its way.
                return
            job()
            del job  # Or it would keep its arguments alive until the next one.
            self._idle.append(queue)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        # A `sys.exit()` in user code ends that code, not the program; a future cannot hold StopIteration.
        future.set_exception(
            RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        )
