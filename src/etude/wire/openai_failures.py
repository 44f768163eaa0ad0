"""Failures of an OpenAI-compatible endpoint: worth another attempt or not."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic_core import from_json

_REQUEST_AT_FAULT = frozenset({400, 413, 422})
_RETRIED_STATUS = frozenset({408, 409, 429})
_SHOWN_CHARACTERS = 300


class Refused(Exception):
    """The endpoint will not answer this request, however often it is asked."""

    def __init__(self, reason: str, *, impossible: bool = False) -> None:
        super().__init__(reason)
        self.impossible = impossible
        """Whether the request is at fault: not the key, the address or the account."""


class Disturbed(Exception):
    """There is no usable answer this time; another attempt may get one."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        """Seconds that the endpoint asked to wait, where it did."""


def failure_of(status: int, headers: Mapping[str, str], data: bytes) -> Refused | Disturbed:
    """What an answer other than 200 means: worth another attempt or not."""
    reason = f"HTTP {status}"
    try:
        body = from_json(data)
    except ValueError:
        body = data.decode(errors="replace").strip()
    said = error_text(body)
    if said:
        reason = f"{reason}: {said}"
    out_of_money = status == 429 and "insufficient_quota" in reason
    if (status in _RETRIED_STATUS or status >= 500) and not out_of_money:
        return Disturbed(reason, _retry_after(headers))
    location = headers.get("location")
    if 300 <= status < 400 and location:
        reason = f"{reason}: redirected to {location}; give that address as `base_url`"
    return Refused(reason, impossible=status in _REQUEST_AT_FAULT)


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


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `Retry-After`, which holds seconds or a date; None when it says nothing usable."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
