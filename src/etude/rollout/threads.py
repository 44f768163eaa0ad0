"""Running functions without asyncio, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(fn: Callable[[], T], *, name: str = "etude-function") -> T:
    """The result of `fn`, run in a daemon thread of its own with the caller's context.

    A thread cannot be killed: when this is cancelled, the thread is abandoned, and does not keep the
    program from ending. Raises what `fn` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: tuple[T | None, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(fn), None
        except BaseException as error:  # noqa: BLE001  user code; raised again where it is awaited
            outcome = None, error
        # The loop is closed when the program has gone on without this thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True, name=name).start()
    result, error = await done
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
