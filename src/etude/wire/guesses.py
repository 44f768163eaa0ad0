"""Keys of clients: compared in a time that tells nothing, and guessed a few times a minute at most."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Mapping

from etude.wire.api_error import ApiError

_MOST_GUESSES = 8
_FORGOTTEN_AFTER = 60.0
"""Seconds."""
_MOST_CLIENTS = 10_000
_WRONG = "the API key is missing or wrong"


class Guesses:
    """The wrong keys that clients have tried of late.

    A client that keeps sending one wrong key is mistaken; one that tries many is guessing, and learns nothing
    more for a minute, not even that a key is right.
    """

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        """When each was tried last, by its digest, by client."""

    def check(
        self, client: str, shown: str, expected: str, *, wrong: str = _WRONG, now: float | None = None
    ) -> None:
        """Raise ApiError unless `shown` is the key: 401, and 429 for a client that has guessed too often.

        `client` is its address, or whatever tells clients apart, `wrong` the message of a 401,
        and `now` a time in seconds.
        """
        now = time.monotonic() if now is None else now
        tried = self._wrong.get(client, {})
        for key in [key for key, at in tried.items() if now - at >= _FORGOTTEN_AFTER]:
            del tried[key]
        digest = hashlib.sha256(shown.encode("utf-8", "replace")).digest()
        if len(tried) >= _MOST_GUESSES and digest not in tried:
            wait = _FORGOTTEN_AFTER - (now - min(tried.values()))
            message = f"{len(tried)} wrong API keys came from {client} within a minute; no more are looked at"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=math.ceil(wait))
        if hmac.compare_digest(digest, hashlib.sha256(expected.encode()).digest()):
            return
        if shown:
            tried[digest] = now
            self._wrong[client] = tried
            self._wrong.move_to_end(client)
            if len(self._wrong) > _MOST_CLIENTS:
                self._wrong.popitem(last=False)
        raise ApiError(401, wrong, code="invalid_api_key")


def shown_key(headers: Mapping[str, str]) -> str:
    """The key that a request bears, empty without one.

    In `Authorization: Bearer`; in `x-api-key` where Anthropic's clients have it; or as the password of an
    address `http://any:key@host`, which is all that some clients can send.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return headers.get("x-api-key", "")
