"""Agent code that blocks: run in threads that nobody has to wait for, and interrupted on the event loop.

While `time.sleep(…)` or an endless loop runs in an `async def`, nothing else does, no timeout fires, and
cancelling is not possible. So a thread watches whether the loop still turns, and when it has not for as
long as an episode may take, it interrupts the code with a signal, as Ctrl-C would.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

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
        message = f"the function raised {type(error).__name__}: {error}"
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

    Only in code that is called, at whatever depth, from a function with the code `inside`. Does
    nothing without a limit, outside of the main thread, or where the system has no such signals.
    """
    number = getattr(signal, "SIGURG", None)
    if seconds is None or number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, watched, stopped = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    interval = min(_INTERVAL_SECONDS, seconds / 4)
    turns = 0
    timer: asyncio.Handle

    def turn() -> None:
        nonlocal turns, timer
        turns += 1
        timer = loop.call_later(interval / 2, turn)

    def watch() -> None:
        seen, still = -1, 0.0
        while not stopped.wait(interval):
            # Counted in intervals and not by the clock: a stopped process or a sleeping laptop is no block.
            still = still + interval if turns == seen else 0.0
            seen = turns
            if still >= seconds:
                still = 0.0
                signal.pthread_kill(watched, number)

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is inside:
                raise BlockedLoop
            frame = frame.f_back

    # SIGURG is ignored by default and hardly ever used; Go's runtime interrupts with it for that reason.
    before = signal.signal(number, interrupt)
    timer = loop.call_soon(turn)
    thread = threading.Thread(target=watch, name="etude-loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        timer.cancel()
        signal.signal(number, before)
