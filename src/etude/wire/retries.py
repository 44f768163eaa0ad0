"""Asking something remote again: why an answer failed, whether and when another try is made, and counts."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic_core import from_json

from etude.core.call import NO_USAGE, Usage
from etude.core.errors import EngineError, ImpossibleCall, ModelOut, PromptTooLong

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Within(Generic[T]):
    """`with Within(variable, value) as value:` sets a context variable, in tasks that the block starts too.

    Several are entered with every call of a model: `contextlib.contextmanager` takes three times as long.
    """

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T] | ContextVar[T | None], value: T) -> None:
        self._variable: ContextVar[Any] = variable
        self._value = value

    def __enter__(self) -> T:
        self._token: Token[Any] = self._variable.set(self._value)
        return self._value

    def __exit__(self, *raised: Any) -> None:
        self._variable.reset(self._token)


@dataclass(slots=True)
class RetryCount:
    """The attempts that were made again so far."""

    causes: dict[str, int] = field(default_factory=dict)
    """Attempts after the first, by why the one before gave nothing usable: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Seconds between attempts."""
    charged: Usage = NO_USAGE
    """The tokens of attempts that were paid for and gave no usable answer."""
    model_out: ModelOut | None = None
    """Why the run cannot go on, whatever the caller makes of the error."""

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return sum(self.causes.values())

    def add(self, causes: Mapping[str, int], waited: float = 0.0) -> None:
        """Count attempts that were made again elsewhere."""
        for cause, number in causes.items():
            self.causes[cause] = self.causes.get(cause, 0) + number
        self.waited += waited


_COUNT: ContextVar[RetryCount | None] = ContextVar("retry_count", default=None)


def counting_retries() -> Within[RetryCount]:
    """Count the retries that are noted within the block, in tasks that it starts too."""
    return Within(_COUNT, RetryCount())


def note_retries(causes: Mapping[str, int], waited: float = 0.0) -> None:
    """To be called before attempts after the first, with the seconds that are waited for them."""
    if count := _COUNT.get():
        count.add(causes, waited)


class ending_where_a_model_is_out(Within[RetryCount]):
    """Raise at the end of the block the ModelOut that an engine raised in it, where that was caught.

    Retries are counted as around the block; with what is counted there too, it ends for that one's ModelOut.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_COUNT, _COUNT.get() or RetryCount())

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        model_out, error = self._value.model_out, raised[1]
        if model_out is not None and (error is None or isinstance(error, Exception)):
            raise model_out from error


def note_model_out(error: ModelOut) -> ModelOut:
    """To be called by an engine with the error that it raises because its model is out; gives it back."""
    if count := _COUNT.get():
        count.model_out = error
    return error


class counting_charges(Within[RetryCount]):
    """Count the tokens that engines note within the block as lost; all else is counted around it, too."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_COUNT, RetryCount())

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        note_retries(self._value.causes, self._value.waited)
        if self._value.model_out is not None:
            note_model_out(self._value.model_out)


def note_charged(usage: Usage) -> None:
    """To be called by an engine for an answer that it cannot use, with the tokens that it says it took."""
    if count := _COUNT.get():
        count.charged = count.charged.plus(usage)


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
    again: Callable[[Exception], Again | None] = lambda error: getattr(error, "again", None),
    policy: RetryPolicy = USUAL,
    spread: random.Random | None = None,
) -> T:
    """The result of `attempt`, which is made again by the policy; each retry is counted.

    `again` says whether an error is worth another attempt, where the error does not say so itself: None
    raises it. An attempt that makes something has to look first for what an earlier one made. Raises the last
    error when the policy is spent.
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
        note_retries({reason.cause: 1}, wait)
        await asyncio.sleep(wait)


_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons where what comes is no TLS."""
WRITE_HTTP = "the server speaks plain HTTP: write http:// in place of https:// in the address"


def reason_of(error: httpx.RequestError) -> str:
    """The error in words, with what to change where it is known."""
    import httpx

    if isinstance(error, httpx.UnsupportedProtocol):
        return "an address begins with http:// or https://"
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.ConnectTimeout):
        is_tls = error.request.url.scheme == "https"
        return f"{words}: no connection" + (f", or {WRITE_HTTP}" if is_tls else "")
    ssl_errors = [each for each in _chain(error) if isinstance(each, ssl.SSLError)]
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in ssl_errors):
        return f"{words}; name a file of certificates to trust in SSL_CERT_FILE, or mend the server's"
    return f"{words}; {WRITE_HTTP}" if is_plain_http(error) else words


def is_plain_http(error: httpx.RequestError) -> bool:
    """Whether the address is one of https, and what answered there is not TLS."""
    # Those of aiohttp's that are SSLErrors may have no reason; the error behind them has one.
    return any(getattr(each, "reason", None) in _NOT_TLS for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_REQUEST_AT_FAULT = frozenset({400, 413, 422})


_WRONG_SCHEME = ("http request to an https server", "http request was sent to https port")
"""How Go's servers and nginx say, by status 400, that they were not spoken to in TLS."""


_SHOWN_CHARACTERS = 300


class Refused(Exception):
    """The endpoint will not answer this request, however often it is asked."""

    def __init__(
        self,
        reason: str,
        *,
        cause: str = "refused",
        impossible: bool = False,
        param: str | None = None,
        is_too_long: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        """In a word: `http_401`, …"""
        self.impossible = impossible
        """Whether the request is at fault: not the key, the address or the account."""
        self.param = param
        """The field of the request that is, where the endpoint says so."""
        self.is_too_long = is_too_long
        """Whether the prompt leaves no room for an answer."""

    def error(self, reason: str) -> EngineError:
        """The same for whoever asked; `reason` says where, too."""
        if not self.impossible:
            return EngineError(reason)
        return PromptTooLong(reason) if self.is_too_long else ImpossibleCall(reason, param=self.param)


class Disturbed(Exception):
    """There is no usable answer this time; another attempt may get one."""

    def __init__(
        self,
        reason: str,
        retry_after: float | None = None,
        *,
        cause: str = "malformed",
        is_gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        """In a word, as retries are counted by: `http_503`, `timeout`, `connection`, `malformed`, …"""
        self.retry_after = retry_after
        """Seconds that the endpoint asked to wait, where it did."""
        self.is_gone = is_gone
        """Whether nothing is to be had there for now, whatever is asked."""

    @property
    def again(self) -> Again:
        """The reason for another attempt."""
        return Again(self.cause, self.retry_after)


def failure_of(status: int, headers: Mapping[str, str], data: bytes) -> Refused | Disturbed:
    """The meaning of an answer other than 200: worth another attempt or not."""
    try:
        body = from_json(data)
    except ValueError:
        body = data.decode(errors="replace").strip()
    text = error_text(body)
    reason = f"HTTP {status}: {text}" if text else f"HTTP {status}"
    cause = f"http_{status}"
    out_of_money = status == 429 and "insufficient_quota" in reason
    if is_worth_retrying(status) and not out_of_money:
        return Disturbed(reason, retry_after(headers), cause=cause)
    if any(words in reason.lower() for words in _WRONG_SCHEME):
        return Refused(f"{reason}: write https:// in place of http:// in `base_url`", cause="scheme")
    location = headers.get("location")
    if 300 <= status < 400 and location:
        reason = f"{reason}: redirected to {location}; give that address as `base_url`"
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    return Refused(
        reason,
        cause=cause,
        impossible=status in _REQUEST_AT_FAULT,
        param=param if isinstance(param := fields.get("param"), str) else None,
        is_too_long=fields.get("code") == "context_length_exceeded",
    )


def error_text(body: Any) -> str:
    """The sentence in an error body, wherever this kind of server puts it, cut to a readable length."""
    while isinstance(body, dict):
        if isinstance(body.get("message"), str):
            code = body.get("code") or body.get("type")
            body = f"{body['message']} ({code})" if code else body["message"]
        else:
            body = body.get("error") or body.get("detail")
    text = " ".join(str(body).split()) if body else ""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
