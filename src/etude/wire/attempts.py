"""Counting attempts at what is asked of something remote: how often it was asked again, why, and how long
that was waited for."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType

from etude.core.call import NO_USAGE, Usage
from etude.core.errors import ModelOut
from etude.core.within import Within


@dataclass(slots=True)
class RetryCount:
    """The attempts that were made again so far."""

    causes: dict[str, int] = field(default_factory=dict)
    """Attempts after the first, by why the one before gave nothing usable: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Seconds between attempts."""
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


def note_retry(cause: str = "other", waited: float = 0.0) -> None:
    """To be called before each attempt after the first, with the seconds that are waited for it."""
    if count := _COUNT.get():
        count.add({cause: 1}, waited)


def note_retries(causes: Mapping[str, int], waited: float) -> None:
    """As `note_retry`, for attempts that another process made."""
    if count := _COUNT.get():
        count.add(causes, waited)


class ending_where_a_model_is_out(Within[RetryCount]):
    """Raise at the end of the block the ModelOut that an engine raised in it, where that was caught.

    Retries are counted as around the block; with what is counted there too, it ends for that one's ModelOut.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_COUNT, _COUNT.get() or RetryCount())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        super().__exit__(kind, error, trace)
        model_out = self._value.model_out
        if model_out is not None and (error is None or isinstance(error, Exception)):
            raise model_out from error


def note_model_out(error: ModelOut) -> ModelOut:
    """To be called by an engine with the error that it raises because its model is out; gives it back."""
    if count := _COUNT.get():
        count.model_out = error
    return error


@dataclass(slots=True)
class Charges:
    """The tokens of attempts that were paid for and gave no usable answer."""

    usage: Usage = NO_USAGE


_CHARGES: ContextVar[Charges | None] = ContextVar("charges", default=None)


def counting_charges() -> Within[Charges]:
    """Count the tokens that engines note within the block as lost, in tasks that it starts too."""
    return Within(_CHARGES, Charges())


def note_charged(usage: Usage) -> None:
    """To be called by an engine for an answer that it cannot use, with the tokens that it says it took."""
    if charges := _CHARGES.get():
        charges.usage = charges.usage.plus(usage)
