"""Counting attempts at what is asked of something remote: how often it was asked again, why, and how long
that was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from etude.core.call import Usage
from etude.core.errors import ModelOut


@dataclass(slots=True)
class RetryCount:
    """The attempts that were made again so far."""

    causes: Counter[str] = field(default_factory=Counter)
    """Attempts after the first, by why the one before gave nothing usable: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Seconds between attempts."""
    failed_at: list[str] = field(default_factory=list)
    """The address of each attempt without a usable answer, where the model has several."""
    model_out: ModelOut | None = None
    """Why the run cannot go on, whatever the caller makes of the error."""

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return self.causes.total()


_COUNT: ContextVar[RetryCount | None] = ContextVar("retry_count", default=None)


@contextmanager
def counting_retries() -> Iterator[RetryCount]:
    """Count the retries that are noted within the block, in tasks that it starts too."""
    count = RetryCount()
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def note_retry(cause: str = "other", waited: float = 0.0) -> None:
    """To be called before each attempt after the first, with the seconds that are waited for it."""
    if count := _COUNT.get():
        count.causes[cause] += 1
        count.waited += waited


def note_retries(causes: dict[str, int], waited: float) -> None:
    """As `note_retry`, for attempts that another process made."""
    if count := _COUNT.get():
        count.causes.update(causes)
        count.waited += waited


def note_failed_attempt(address: str) -> None:
    """To be called by an engine with several addresses, after each attempt that gave no usable answer."""
    if count := _COUNT.get():
        count.failed_at.append(address)


@contextmanager
def ending_where_a_model_is_out() -> Iterator[None]:
    """Raise at the end of the block the ModelOut that an engine raised in it, where that was caught.

    Retries are counted as around the block.
    """
    outside = _COUNT.get()
    with counting_retries() as count:
        try:
            yield
        except Exception as error:
            if count.model_out is not None:
                raise count.model_out from error
            raise
        finally:
            if outside is not None:
                outside.causes.update(count.causes)
                outside.waited += count.waited
                outside.failed_at += count.failed_at
    if count.model_out is not None:
        raise count.model_out


def note_model_out(error: ModelOut) -> ModelOut:
    """To be called by an engine with the error that it raises because its model is out; gives it back."""
    if count := _COUNT.get():
        count.model_out = error
    return error


@dataclass(slots=True)
class Charges:
    """The tokens of attempts that were paid for and gave no usable answer."""

    usage: Usage = field(default_factory=Usage)


_CHARGES: ContextVar[Charges | None] = ContextVar("charges", default=None)


@contextmanager
def counting_charges() -> Iterator[Charges]:
    """Count the tokens that engines note within the block as lost, in tasks that it starts too."""
    charges = Charges()
    token = _CHARGES.set(charges)
    try:
        yield charges
    finally:
        _CHARGES.reset(token)


def note_charged(usage: Usage) -> None:
    """To be called by an engine for an answer that it cannot use, with the tokens that it says it took."""
    if charges := _CHARGES.get():
        charges.usage = charges.usage.plus(usage)
