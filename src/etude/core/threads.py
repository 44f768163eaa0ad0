"""Functions that may block, or take long, run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from etude.core.errors import words_of

P = ParamSpec("P")
T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long code that was told to stop may take to clean up, before it is left to itself."""
LARGE = 32 * 1024
"""Bytes or characters: work on so many takes a millisecond or more."""

_idle: list[SimpleQueue[Callable[[], None]]] = []
"""Of threads that have nothing to do: to begin one takes longer than most functions do."""
os.register_at_fork(after_in_child=_idle.clear)


async def call_in_thread(fn: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of a function that is called in a daemon thread, with the context of whoever calls this.

    Unlike in an executor there are as many threads as there are calls at once, and they are daemons: a
    function that hangs holds up neither the calls after it nor the end of the program. When this is
    cancelled, the function is left to itself; where `stop` is given, that is called first, and the function
    has a moment to end. Raises what the function raises, and RuntimeError for what would end the program.
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
        # The loop is closed when the program has gone on without this thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set_result, (result, error))

    try:
        queue = _idle.pop()
    except IndexError:
        queue = _new_thread()
    queue.put(run)
    try:
        result, error = await asyncio.shield(done)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
            await asyncio.wait({done}, timeout=GRACE_SECONDS)
        raise
    if isinstance(error, StopIteration) or not isinstance(error, Exception | asyncio.CancelledError | None):
        # Raised there it means that code, not the program; and no future can hold a StopIteration.
        raise RuntimeError(f"the function raised {words_of(error)}").with_traceback(error.__traceback__)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _new_thread() -> SimpleQueue[Callable[[], None]]:
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            queue.get()()
            _idle.append(queue)

    threading.Thread(target=work, name="etude-user-code", daemon=True).start()
    return queue


async def beside_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which is done in a thread where `size`, that of what it works on, is large.

    Raises what it raises. When the caller is cancelled, the work goes on, and its result is dropped.
    """
    return work(*args, **kwargs) if size < LARGE else await asyncio.to_thread(work, *args, **kwargs)
