"""The circuit breaker of a model: where its calls fail one after the other, no more of them are made."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from etude.core.errors import ModelOut

_PAUSE_SECONDS = 30.0
"""After which an engine that is used on although its model is out lets one call through."""

_WHAT_TO_DO = {
    "http_401": "check its `api_key`, or OPENAI_API_KEY",
    "http_403": "check its `api_key`, or OPENAI_API_KEY, and what the key may do",
    "http_402": "check the account's balance",
    "http_404": "check its `model_name` and `base_url`",
    "no_model": "load the weights at its address, or check `model_name`",
    "timeout": "look at the server's load and log, or raise `request_timeout`",
    "connection": "start the server, or check `base_url`",
    "scheme": "check `base_url`",
    "too_large": "ask for fewer logprobs, or raise `max_answer_mb`",
}


class Breaker:
    """Counts the calls that failed since the last one that was answered, by their causes."""

    def __init__(self, most: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` calls that fail for one cause, and none is answered, are too many; None allows all."""
        self._most = most
        self._clock = clock
        self._failed: Counter[str] = Counter()
        self._error: ModelOut | None = None
        self._until = 0.0
        self._last_answer = -math.inf

    def require_closed(self) -> None:
        """Raise ModelOut while no call may be made."""
        if self._error is None:
            return
        if self._clock() < self._until:
            raise ModelOut(str(self._error))
        self._until = self._clock() + _PAUSE_SECONDS

    def answered(self) -> None:
        """Note a call with an answer."""
        self._last_answer = self._clock()
        if self._failed:
            self._failed.clear()
        self._error = None

    def has_answered(self, since: float) -> bool:
        """Whether a call was answered after that time: the model is there, if not for all."""
        return self._last_answer > since

    def failed(self, cause: str, message: str) -> ModelOut | None:
        """Note a call that failed for good; the error to raise in its place where it was one too many."""
        self._failed[cause] += 1
        count = self._failed[cause]
        if self._most is None or count < self._most:
            return None
        advice = _WHAT_TO_DO.get(cause, "look at the server's log")
        self._error = ModelOut(
            f"{message}. Its last {count} calls failed like this, with no answer between them, so no more "
            f"are made: {advice}, then resume the run. What was answered is kept"
        )
        self._until = self._clock() + _PAUSE_SECONDS
        return self._error
