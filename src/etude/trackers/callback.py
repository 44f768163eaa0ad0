"""A Python function as a tracker: it is called with each record."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import TrackerConfig
from etude.config.import_path import import_object
from etude.config.registry import register_tracker
from etude.core.errors import RequestError
from etude.trackers.record import RunRecord, State, TrackedRun, Tracker

if TYPE_CHECKING:
    from etude.config.builder import Builder


class FunctionTrackerConfig(TrackerConfig, name="function"):
    """A function of yours that is called with each record of the run, or an `etude.Tracker` of yours."""

    function: str
    """Its import path, `module:name`."""

    def destination(self) -> str:
        return self.function


class LiveTrackerConfig(TrackerConfig, name="live"):
    """A function that a program gave as a Python object."""

    name: str
    """The name of the function."""
    value: Any = Field(default=None, exclude=True, repr=False)

    def destination(self) -> str:
        return self.name


class FunctionTracker:
    """Calls a function, plain or async, with each record."""

    def __init__(self, function: Callable[[RunRecord], Any], missing: str = "") -> None:
        """`missing` says why there is no function, as where its program is not running."""
        self._function, self._missing = function, missing

    def open(self, run: TrackedRun) -> str:
        """There is nothing to begin. Raises RequestError without a function."""
        if self._missing:
            raise RequestError(self._missing)
        return ""

    def send(self, record: RunRecord) -> None:
        """Call the function."""
        result = self._function(record)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def close(self, state: State) -> None:
        """There is nothing to end."""


def as_tracker(value: Any) -> Tracker:
    """A function, or an object with the methods of a tracker, or a class of such, as a tracker.

    Raises RequestError for anything else.
    """
    if isinstance(value, type):
        value = value()
    if all(callable(getattr(value, name, None)) for name in ("open", "send", "close")):
        tracker: Tracker = value
        return tracker
    if not callable(value):
        raise RequestError(f"a tracker is a function of a record, or has open, send and close: {value!r:.80}")
    return FunctionTracker(value)


def live_tracker_config(value: Any) -> LiveTrackerConfig:
    """The config of a tracker that a program gives. Raises RequestError for what is none."""
    as_tracker(value)
    return LiveTrackerConfig(name=getattr(value, "__name__", type(value).__name__), value=value)


@register_tracker(config_type=FunctionTrackerConfig)
async def function_tracker(config: FunctionTrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """Raises RequestError where there is no such function."""
    yield as_tracker(import_object(config.function))


@register_tracker(config_type=LiveTrackerConfig)
async def live_tracker(config: LiveTrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """The function; where its program is not running, what says so as soon as it is needed."""
    if config.value is not None:
        yield as_tracker(config.value)
        return
    run = "run" if builder.run is None else str(builder.run.path)
    yield FunctionTracker(
        print,
        f"the run was started by a program with its own function '{config.name}', which is not in the "
        f"config; give it again, in Python: etude.resume({run!r}, report=…)",
    )
