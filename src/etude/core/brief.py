"""Short functions, called in one thread one after the other: to wake a thread takes longer than most do.

Where they turn out not to be short, each has a thread of its own after a moment: none waits for another.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from etude.core.threads import ThreadCall, run_in_thread

T = TypeVar("T")

_MOMENT_SECONDS = 0.01
"""After which the calls that still wait get threads of their own."""


class _Batch:
    """Calls that one thread does; it is over when there are no more, or a moment has passed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: ThreadCall[Any]) -> None:
        self.loop = loop
        self._calls = deque([call])
        self._outcomes: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_open, self._is_told = True, False
        call.settle = self.settle
        self.is_given_up = False
        """Whether the thread was, in the call that it was in last."""
        run_in_thread(self)
        loop.call_later(_MOMENT_SECONDS, self._spread)

    def take(self, call: ThreadCall[Any]) -> bool:
        """Take one more call; False when it is over."""
        with self._lock:
            if self._is_open:
                call.settle = self.settle
                self._calls.append(call)
            return self._is_open

    def run(self) -> None:
        """Do the calls, in this thread."""
        while not self.is_given_up and (call := self._next()) is not None:
            call.run()
            self.is_given_up = call.is_given_up

    def settle(self, outcome: Callable[[], None]) -> None:
        """Have the event loop call `outcome`, which it is woken for once for all that have come meanwhile."""
        self._outcomes.append(outcome)
        if not self._is_told:
            self._is_told = True
            self.loop.call_soon_threadsafe(self._settle_all)

    def _settle_all(self) -> None:
        self._is_told = False  # First: what is added from here on is seen below, or told again.
        while self._outcomes:
            self._outcomes.popleft()()

    def _next(self) -> ThreadCall[Any] | None:
        with self._lock:
            self._is_open = bool(self._calls)
            return self._calls.popleft() if self._calls else None

    def _spread(self) -> None:
        with self._lock:
            self._is_open, waiting = False, [*self._calls]
            self._calls.clear()
        for call in waiting:
            run_in_thread(call)


class _Latest(threading.local):
    """The batch that was begun last by the event loop of each thread."""

    batch: _Batch | None = None


_latest = _Latest()


async def call_briefly(fn: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of `fn`, as by `call_in_thread`, for functions of which most are over at once."""
    loop = asyncio.get_running_loop()

    def start(call: ThreadCall[Any]) -> None:
        batch = _latest.batch
        if batch is None or batch.loop is not loop or not batch.take(call):
            batch = _latest.batch = _Batch(loop, call)

    return await ThreadCall(fn).result(stop, start)
