"""Agent code that blocks: run in threads that nobody has to wait for, and interrupted on the event loop.

While `time.sleep(…)` or an endless loop runs in an `async def`, nothing else does, no timeout fires, and
cancelling is not possible. So a thread watches whether the loop still turns, and when it has not for as
long as an episode may take, it interrupts the code with a signal, as Ctrl-C would.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from etude.core.errors import words_of

T = TypeVar("T")

_IDLE_SECONDS = 10.0
_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The job queues of threads that have nothing to do; a thread that is not used for a while ends."""

_INTERVAL_SECONDS = 1.0


class BlockedLoop(BaseException):
    """Raised in agent code that blocks the event loop. No Exception, so that no retry loop catches it."""


async def call_in_thread(fn: Callable[[], T]) -> T:
    """The result of `fn`, run in a daemon thread with the caller's context.

    Unlike in an executor there are as many threads as there are calls at once, and they are daemons:
    a function that hangs holds up neither the calls after it nor the end of the program. When this is
    cancelled, the thread is left to itself.

    Raises what `fn` raises, and RuntimeError for what would end the program.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(*outcome: Any) -> None:
        if not done.done():
            done.set_result(outcome)

    def job() -> None:
        result = error = None
        try:
            result = context.run(fn)
        except BaseException as raised:  # noqa: BLE001  user code; raised again where it is awaited
            error = raised
        # The loop is closed when the program has gone on without this thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    _take_thread().put(job)
    result, error = await done
    if error is not None and (isinstance(error, StopIteration) or not isinstance(error, Exception)):
        # Raised there it means that code, not the program; and no future can hold a StopIteration.
        message = f"the function raised {words_of(error)}"
        raise RuntimeError(message).with_traceback(error.__traceback__)
    if error is not None:
        raise error
    return cast("T", result)


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


@contextlib.contextmanager
def watch_loop(seconds: float | None, inside: CodeType) -> Iterator[None]:
    """Raise BlockedLoop in code that keeps the running event loop from turning for `seconds`.

    Only in code that is called, at whatever depth, from a function with the code `inside`. There may be
    several such limits at a time. Does nothing without a limit, outside of the main thread, or where the
    system has no such signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not hasattr(signal, "SIGURG") or not is_main:
        yield
        return
    limit = (inside, seconds)
    if not _watch.limits:
        _watch.start(asyncio.get_running_loop(), limit)
    else:
        _watch.limits.append(limit)
    try:
        yield
    finally:
        _watch.limits.remove(limit)
        if not _watch.limits:
            _watch.stop()


class _Watch:
    """A thread that looks whether the event loop of the main thread still turns, while there are limits."""

    def __init__(self) -> None:
        self.limits: list[tuple[CodeType, float]] = []
        self._turns = 0

    def start(self, loop: asyncio.AbstractEventLoop, limit: tuple[CodeType, float]) -> None:
        """Begin with the first limit."""
        self.limits.append(limit)
        self._loop, self._stopped = loop, threading.Event()
        # SIGURG is ignored by default and hardly ever used; Go's runtime interrupts with it for that reason.
        self._before = signal.signal(signal.SIGURG, self._interrupt)
        self._timer: asyncio.Handle = loop.call_soon(self._turn)
        self._thread = threading.Thread(target=self._look, name="etude-loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave everything as it was before."""
        self._stopped.set()
        self._thread.join()
        self._timer.cancel()
        signal.signal(signal.SIGURG, self._before)

    def _interval(self) -> float:
        return min([_INTERVAL_SECONDS, *(seconds / 4 for _, seconds in self.limits)])

    def _turn(self) -> None:
        self._turns += 1
        self._timer = self._loop.call_later(self._interval() / 2, self._turn)

    def _look(self) -> None:
        main, seen, still = threading.main_thread().ident, -1, 0.0
        assert main is not None
        while not self._stopped.wait(interval := self._interval()):
            # Counted in intervals and not by the clock: a stopped process or a sleeping laptop is no block.
            still = still + interval if self._turns == seen else 0.0
            seen = self._turns
            if self._limit_of(sys._current_frames().get(main)) <= still:
                still = 0.0
                signal.pthread_kill(main, signal.SIGURG)

    def _limit_of(self, frame: FrameType | None) -> float:
        """The limit of the code that runs; infinite where it has none."""
        while frame is not None:
            for inside, seconds in self.limits:
                if frame.f_code is inside:
                    return seconds
            frame = frame.f_back
        return math.inf

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._limit_of(frame) < math.inf:
            raise BlockedLoop


_watch = _Watch()
