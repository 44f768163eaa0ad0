"""Retries of remote requests: why an answer failed, whether and when to try again, and retry counts."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import from_json

from etude.core.call import NO_USAGE, Usage
from etude.core.errors import EngineError, ImpossibleCall, PromptTooLong
from etude.core.threads import set_value

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


@dataclass(slots=True)
class RetryCount:
    """The number of retries so far, by cause, and their cost."""

    causes: Counter[str] = field(default_factory=Counter)
    """Retries by the cause of the preceding failure: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Total seconds of waiting between attempts."""
    charged: Usage = NO_USAGE
    """Tokens of attempts that were charged but gave no usable answer."""

    def add(self, causes: Mapping[str, int], waited: float = 0.0) -> None:
        """Add retries that were made elsewhere."""
        self.causes.update(causes)
        self.waited += waited


_COUNT: ContextVar[RetryCount | None] = ContextVar("retry_count", default=None)


@contextmanager
def count_retries() -> Iterator[RetryCount]:
    """Count what is noted in the block and in its tasks. An outer count gets all of it but the charges."""
    count = RetryCount()
    try:
        with set_value(_COUNT, count):
            yield count
    finally:
        note_retries(count.causes, count.waited)


def note_retries(causes: Mapping[str, int], waited: float = 0.0) -> None:
    """Record retries, before they start, and the seconds of waiting before them."""
    if causes and (count := _COUNT.get()):
        count.add(causes, waited)


def note_charged(usage: Usage) -> None:
    """Record the tokens that an unusable answer reports as used. Engines call this."""
    if count := _COUNT.get():
        count.charged = count.charged.plus(usage)


_NEVER_BETTER = frozenset({501, 505})
"""Server errors that mean that the server cannot serve the request at all."""
_LATER_BETTER = frozenset({408, 409, 425, 429})


def is_worth_retrying(status: int) -> bool:
    """Return whether a retry of a request that failed with this HTTP status may succeed."""
    return status in _LATER_BETTER or (status >= 500 and status not in _NEVER_BETTER)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait, or None if it does not say.

    `retry-after-ms`, which OpenAI also sends, has milliseconds.
    """
    for name, factor in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(ValueError):
            if (seconds := float(headers.get(name, "")) * factor) >= 0:
                return seconds
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of retries of a request, and the waits before them."""

    retries: int = 4
    """Attempts after the first."""
    first_wait: float = 0.5
    """Maximum seconds before the first retry; doubles before each further retry."""
    longest_wait: float = 30.0
    """Maximum seconds before any retry, even if the server asks for more."""
    deadline: float = 600.0
    """Seconds since the start of the first attempt after which no attempt may start."""

    def wait(self, number: int, asked: float | None, spread: random.Random) -> float:
        """Return the seconds to wait before the `number`-th retry; `asked` is the server's own request.

        The wait is uniform between 0 and the maximum ("full jitter"): clients that failed together return
        evenly spread, with the least total work (Brooker, "Exponential Backoff And Jitter", AWS, 2015).
        """
        if asked is not None:
            # Clients wait at least as long as asked, and not all until the same moment.
            return min(asked + spread.uniform(0.0, self.first_wait), self.longest_wait)
        return spread.uniform(0.0, min(self.longest_wait, self.first_wait * 2.0 ** min(number - 1, 64)))


USUAL = RetryPolicy()


@dataclass(frozen=True, slots=True)
class RetryReason:
    """The reason for another attempt, after one that gave nothing usable."""

    cause: str
    """One word for metrics: `http_503`, `timeout`, `connection`, …"""
    retry_after: float | None = None
    """Seconds that the server asked to wait."""


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    again: Callable[[Exception], RetryReason | None] = lambda error: getattr(error, "again", None),
    policy: RetryPolicy = USUAL,
    spread: random.Random | None = None,
) -> T:
    """Return the result of `attempt`, retried according to the policy; each retry is counted.

    `again` returns the reason to retry after an error, or None to raise it; by default, the error's own
    `again`. An attempt with side effects must first check for an earlier attempt's. Raises the last
    error after the policy's last attempt.
    """
    spread, began = spread or random.Random(), time.monotonic()
    retries = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            reason = again(error)
            if reason is None or retries >= policy.retries:
                raise
            wait = policy.wait(retries + 1, reason.retry_after, spread)
            if time.monotonic() - began + wait > policy.deadline:
                raise
        retries += 1
        note_retries({reason.cause: 1}, wait)
        await asyncio.sleep(wait)


def describe(error: httpx.RequestError) -> str:
    """Describe the error, with a remedy where one is known."""
    import httpx

    if isinstance(error, httpx.UnsupportedProtocol):
        return "an address must begin with http:// or https://"
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and error.request.url.scheme == "https":
        words += "; if the server speaks plain HTTP, write http:// instead of https:// in the address. "
        words += "SSL_CERT_FILE names a file of certificates to trust"
    return words


_SHOWN_CHARACTERS = 300


@dataclass(eq=False, repr=False)
class Refusal(Exception):
    """The endpoint will never answer this request; retries are useless."""

    reason: str
    _: KW_ONLY
    cause: str = "refused"
    """One word: `http_401`, …"""
    impossible: bool = False
    """Whether the request itself is at fault, not the key, the address or the account."""
    param: str | None = None
    """The field of the request at fault, if the endpoint names it."""
    is_too_long: bool = False
    """Whether the prompt leaves no room for an answer."""

    def error(self, reason: str) -> EngineError:
        """Convert to an error for the caller; `reason` also names the place."""
        if not self.impossible:
            return EngineError(reason)
        return PromptTooLong(reason) if self.is_too_long else ImpossibleCall(reason, param=self.param)


@dataclass(eq=False, repr=False)
class Retryable(Exception):
    """This attempt gave no usable answer; a retry may."""

    reason: str
    _: KW_ONLY
    retry_after: float | None = None
    """Seconds that the endpoint asked to wait, if it did."""
    cause: str = "malformed"
    """One word for retry counts: `http_503`, `timeout`, `connection`, `malformed`, …"""

    @property
    def again(self) -> RetryReason:
        """The reason for another attempt."""
        return RetryReason(self.cause, self.retry_after)


def to_failure(status: int, headers: Mapping[str, str], data: bytes) -> Refusal | Retryable:
    """Convert an answer with a status other than 200: Retryable if a retry may succeed, else Refusal."""
    try:
        body = from_json(data)
    except ValueError:
        body = data.decode(errors="replace").strip()
    text = error_text(body)
    reason = f"HTTP {status}: {text}" if text else f"HTTP {status}"
    cause = f"http_{status}"
    out_of_money = status == 429 and "insufficient_quota" in reason
    if is_worth_retrying(status) and not out_of_money:
        return Retryable(reason, retry_after=retry_after(headers), cause=cause)
    if 300 <= status < 400 and (location := headers.get("location")):
        reason = f"{reason}: redirected to {location}; give that address as `base_url`"
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    return Refusal(
        reason,
        cause=cause,
        impossible=status in {400, 413, 422},
        param=param if isinstance(param := fields.get("param"), str) else None,
        is_too_long=fields.get("code") == "context_length_exceeded",
    )


def error_text(body: Any) -> str:
    """Return the message in any kind of server's error body, cut to a readable length."""
    while isinstance(body, dict):
        if isinstance(body.get("message"), str):
            code = body.get("code") or body.get("type")
            body = f"{body['message']} ({code})" if code else body["message"]
        else:
            body = body.get("error") or body.get("detail")
    text = " ".join(str(body).split()) if body else ""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
