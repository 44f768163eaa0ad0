"""Agent code that blocks the event loop: interrupted there.

While `time.sleep(…)` or an endless loop runs in an `async def`, nothing else does, no timeout fires, and
cancelling is not possible. So a thread watches whether the loop still turns, and when it has not for as
long as an episode may take, it interrupts the code with a signal, as Ctrl-C would.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

_INTERVAL_SECONDS = 1.0


class BlockedLoop(BaseException):
    """Raised in agent code that blocks the event loop. No Exception, so that no retry loop catches it."""


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
