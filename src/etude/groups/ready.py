"""Waiting until something is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_LOG = logging.getLogger("etude.groups")
_POLL = 0.5


async def until(is_ready: Callable[[], Awaitable[bool]], seconds: float, who: str, what: str) -> None:
    """Ask again and again, and tell the log what `who` waits for when it isn't there at once.

    Raises TimeoutError, naming both, when it is not ready after `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            if await is_ready():
                return
            _LOG.warning("%s waits up to %g s for %s, which is not healthy", who, seconds, what)
            # Nobody tells when a server in another process has started; hence the polling.
            while not await is_ready():  # noqa: ASYNC110
                await asyncio.sleep(min(_POLL, seconds))
            _LOG.warning("%s goes on: %s is healthy", who, what)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{who} is not ready after {seconds:g} s: {what} is not healthy") from error
