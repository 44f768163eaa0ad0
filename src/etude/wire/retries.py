"""How what is remote is asked again: the one policy of all clients, and the loop that follows it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from etude.wire.attempts import note_retry

T = TypeVar("T")

_LONGEST_RETRY_AFTER = 3600.0
"""Seconds for which a server's word is taken; most policies wait less."""
_NEVER_BETTER = frozenset({501, 505})
"""Server errors that say that the server cannot do it at all."""
_LATER_BETTER = frozenset({408, 409, 425, 429})


def is_worth_retrying(status: int) -> bool:
    """Whether the same request may have a better answer than one of this HTTP status."""
    return status in _LATER_BETTER or (status >= 500 and status not in _NEVER_BETTER)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait, an hour at most; None where it says nothing that can be meant.

    `Retry-After` holds seconds or a date, and `retry-after-ms`, which OpenAI sends too, milliseconds.
    """
    for name, factor in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * factor
        except ValueError:
            seconds = _seconds_until(value)
        if not math.isnan(seconds):
            return min(max(0.0, seconds), _LONGEST_RETRY_AFTER)
    return None


def _seconds_until(date: str) -> float:
    """Seconds until an HTTP date; NaN for what is none. Dates that no clock reaches are far away."""
    try:
        parsed = parsedate_to_datetime(date)
        return (parsed.replace(tzinfo=parsed.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which waits, a request is sent again that may do better later."""

    retries: int = 4
    """Attempts after the first."""
    first_wait: float = 0.5
    """Seconds: the longest wait before the first retry; twice as long before each further one."""
    longest_wait: float = 30.0
    """Seconds: the longest wait of all, also where the server asks for more."""
    deadline: float = 600.0
    """Seconds since the first attempt began, after which no other is begun."""

    def wait(self, number: int, asked: float | None, spread: random.Random) -> float:
        """Seconds before the `number`-th retry that waits; `asked` are those that the server asked for.

        Any time up to the longest is as likely ("full jitter"): clients that failed together then come back
        evenly spread, with the least work for all (Brooker, "Exponential Backoff And Jitter", AWS, 2015).
        """
        if asked is not None:
            # Not before the time that was asked for, and not all at once after it.
            return min(asked + spread.uniform(0.0, self.first_wait), self.longest_wait)
        return spread.uniform(0.0, min(self.longest_wait, self.first_wait * 2.0 ** min(number - 1, 64)))


USUAL = RetryPolicy()
USUAL_MEGABYTES = 32.0
"""Of one answer: that of 16,000 tokens with the 20 likeliest in the place of each takes less."""


@dataclass(frozen=True, slots=True)
class Again:
    """An attempt that gave nothing usable and is worth another."""

    cause: str
    """In a word, as metrics count it: `http_503`, `timeout`, `connection`, …"""
    retry_after: float | None = None
    """Seconds that the server asked to wait."""
    is_elsewhere: bool = False
    """Whether the next attempt goes to another server, which need not be waited for."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    again: Callable[[Exception], Again | None],
    policy: RetryPolicy = USUAL,
    spread: random.Random | None = None,
) -> T:
    """The result of `attempt`, which is made again by the policy; each retry is counted.

    `again` says whether an error is worth another attempt: None raises it. An attempt that makes something
    has to look first for what an earlier one made. Raises the last error when the policy is spent.
    """
    spread, began = spread or random.Random(), time.monotonic()
    retries = waits = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            reason = again(error)
            if reason is None or retries >= policy.retries:
                raise
            waits += not reason.is_elsewhere
            wait = 0.0 if reason.is_elsewhere else policy.wait(waits, reason.retry_after, spread)
            if time.monotonic() - began + wait > policy.deadline:
                raise
        retries += 1
        note_retry(reason.cause, wait)
        await asyncio.sleep(wait)
