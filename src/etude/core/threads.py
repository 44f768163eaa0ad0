"""Functions that may block, or take long, run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from etude.core.errors import error_words

P = ParamSpec("P")
T = TypeVar("T")

GRACE_SECONDS = 1.0
"""Seconds that code may take to clean up after it was told to stop, before it is abandoned."""
LARGE = 32 * 1024
"""Bytes or characters. Work on more takes a millisecond or longer."""


async def call_in_thread(fn: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Call a function in a daemon thread, in the caller's context, and return its result.

    Unlike in an executor, every concurrent call has its own thread, and threads are daemons. So a function
    that hangs blocks neither later calls nor the end of the program. On cancellation the function is
    abandoned. If `stop` is given, it is called first, and the function has a moment to end. Raises what the
    function raises, and RuntimeError instead of an exception that would end the program.
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
    if isinstance(error, StopIteration) or not isinstance(error, Exception | asyncio.CancelledError | None):
        # Such an exception must end that code and not the program. No future can hold a StopIteration.
        raise RuntimeError(f"the function raised {error_words(error)}").with_traceback(error.__traceback__)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


async def call_any(fn: Callable[..., Any]) -> Any:
    """Return the result of a function without arguments: of an async one here, else of one in a thread.

    What a decorator hides counts as plain: it may run its own event loop, which only a thread can.
    """
    result = fn() if inspect.iscoroutinefunction(fn) else await call_in_thread(fn)
    return await result if inspect.isawaitable(result) else result


async def call_off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, run in a thread if `size`, the size of its input, is large.

    Raises what `work` raises. If the caller is cancelled, the work continues, and its result is dropped.
    """
    return work(*args, **kwargs) if size < LARGE else await asyncio.to_thread(work, *args, **kwargs)
