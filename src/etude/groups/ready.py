"""Waiting until something is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_POLL = 0.5


async def until(is_ready: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    """Ask again and again. Raises TimeoutError, naming `what`, when it is not ready after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            # Nobody tells when a server in another process has started; hence the polling.
            while not await is_ready():  # noqa: ASYNC110
                await asyncio.sleep(min(_POLL, seconds))
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{what} is not ready after {seconds:g} s") from error
