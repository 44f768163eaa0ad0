"""A run with its trackers: they are woken when something is journalled, and waited for at its end."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from etude.config.assemble import parse_trackers
from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.errors import BudgetReached, RunPaused, StoreError
from etude.core.interfaces import Progress
from etude.store.journal import Json
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data
from etude.trackers.callback import LiveTrackerConfig, live_tracker_config
from etude.trackers.reader import TrackerReader
from etude.trackers.record import State

_SECONDS_AFTER_STOP = 2.0
"""Who has stopped a run does not want to wait for its trackers."""
_SECONDS_TO_STORE = 60.0


@dataclass(frozen=True, slots=True)
class TrackerOutcome:
    """How far a tracker has come when it was closed."""

    tracker: str
    sent: int
    """Records that are there."""
    records: int
    """Records that the run has."""
    error: str
    """Why the others are not there, where that is known."""


class Reporting:
    """The trackers of an open run, as a context manager around the work.

    Nothing is sent, and no thread begins, before `wake`.
    """

    def __init__(
        self, config: Config, run: RunFolder, progress: Progress, *, patience: float | None = None
    ) -> None:
        """`patience` takes the place of that of each tracker."""
        self._config, self._run, self._progress = config, run, progress
        self._patience = patience
        self._readers: list[TrackerReader] = []
        self._exits = AsyncExitStack()
        self.outcomes: list[TrackerOutcome] = []
        """One for each tracker, once the block is over."""

    def wake(self) -> None:
        """Have the trackers look for what is new in the journal; returns at once."""
        for reader in self._readers:
            reader.wake()

    async def __aenter__(self) -> Self:
        """Build the trackers. Raises RequestError for one that cannot be, such as for want of its extra."""
        loop = asyncio.get_running_loop()
        builder = await self._exits.enter_async_context(Builder(self._config, self._run))
        journal = self._run.journal

        def put(key: str, value: Json) -> None:
            if loop.is_closed():
                raise StoreError(f"{journal.path}: the run is over")
            asyncio.run_coroutine_threadsafe(journal.put(key, value), loop).result(timeout=_SECONDS_TO_STORE)

        def tell(text: str, warning: bool) -> None:
            # A closed loop has nobody left who listens.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: self._progress.message(text, warning=warning))

        for tracker, config in zip(await builder.get_trackers(), self._config.report, strict=True):
            self._readers.append(TrackerReader(tracker, config, self._run.path, put, tell))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = _state_of(error)
        # Of what failed before anything was journalled there is nothing to show.
        readers = [reader for reader in self._readers if error is None or reader.is_started]
        try:
            for reader in readers:
                reader.close(state)
            await asyncio.gather(*(self._ended(reader, state) for reader in readers))
        finally:
            await self._exits.aclose()

    async def _ended(self, reader: TrackerReader, state: State) -> None:
        seconds = reader.config.patience if self._patience is None else self._patience
        if state == "stopped":
            seconds = min(seconds, _SECONDS_AFTER_STOP)
        await asyncio.to_thread(reader.over.wait, seconds)
        reader.abandon()
        sent, records = reader.counts()
        self.outcomes.append(TrackerOutcome(reader.title, sent, records, reader.error))
        if sent < records:
            why = reader.error or f"more were not sent within the {seconds:g} s after its end"
            self._progress.message(
                f"{reader.title} has {sent} of {records} records of the run ({why}). The rest "
                f"is sent with: etude report {shlex.quote(str(self._run.path))}",
                warning=True,
            )


def _state_of(error: BaseException | None) -> State:
    if error is None:
        return "finished"
    is_stop = not isinstance(error, Exception) or isinstance(error, RunPaused | BudgetReached)
    return "stopped" if is_stop else "failed"


def with_trackers(config: Config, report: Any) -> Config:
    """The config with trackers that a program gives: functions, trackers, or what a config may say.

    They take the place of those that a program gave when the run began. Raises ConfigError.
    """
    if report is None:
        return config
    given = report if isinstance(report, list | tuple) else [report]
    sources = [
        each if isinstance(each, str | dict | TrackerConfig) else live_tracker_config(each) for each in given
    ]
    trackers = parse_trackers(sources, config)
    there = {(each.type_name, each.destination()) for each in trackers}
    kept = [
        each
        for each in config.report
        if not isinstance(each, LiveTrackerConfig) and (each.type_name, each.destination()) not in there
    ]
    return config.model_copy(update={"report": [*kept, *trackers]})


def report_config(run: RunFolder, overrides: Sequence[str]) -> Config:
    """The `report` block of a stored run alone, as it is with these overrides: no agent or model is needed.

    Raises ConfigError, and StoreError where the run's config is not what was written.
    """
    stored = stored_data(run.path)
    settings = (stored.get("finetuning") or {}).get("run_configuration") or {}
    kept: dict[str, Any] = {"report": stored.get("report") or []}
    if settings.get("config_file"):
        kept["finetuning"] = {"run_configuration": {"config_file": settings["config_file"]}}
    return parse_config(kept, overrides)
