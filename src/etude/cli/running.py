"""Running the asynchronous work of a command, so that it can be stopped."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from etude.cli.errors import Terminated

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.

    Ctrl-C and SIGTERM cancel it, so that it can clean up; then KeyboardInterrupt or Terminated is
    raised. A second Ctrl-C does not wait for that.
    """
    import asyncio  # Here and not above: `etude --help` need not wait for it.

    results = asyncio.run(_until_terminated(work))
    if not results:
        raise Terminated
    return results[0]


async def _until_terminated(work: Coroutine[Any, Any, T]) -> list[T]:
    """The result in a list; an empty list when SIGTERM came first."""
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    asked_to_end = False

    def end() -> None:
        nonlocal asked_to_end
        asked_to_end = True
        task.cancel()

    # Only the main thread of a system with signals can do this; elsewhere the default holds.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return [await task]
    except asyncio.CancelledError:
        if not asked_to_end:
            raise
        return []
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)
