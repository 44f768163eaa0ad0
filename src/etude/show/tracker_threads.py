"""The trackers of a run: each has a thread that reads the journal and sends new records.

Trackers are woken when something is journalled, and awaited at the end of the run. The journal notes a record
once it has been sent. A record that was being sent when the process was killed is sent again. An unreachable
tracker is tried again every ten seconds, and delays nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from etude.config.assemble import parse_trackers
from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.schema import Config
from etude.core.errors import BudgetReached, EtudeError, RequestError, StoreError, first_line
from etude.core.interfaces import Progress
from etude.core.keys import content_hash
from etude.show import tracker
from etude.show.tracker import LiveTrackerConfig, State, TrackedRun, Tracker, as_tracker, list_records
from etude.store.journal import Json
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data

_PAUSE = 10.0
_SECONDS_AFTER_STOP = 2.0
"""A user who has stopped a run does not want to wait for its trackers."""
_SECONDS_TO_STORE = 60.0


class TrackerReader:
    """The thread that serves one tracker until it is closed."""

    def __init__(
        self,
        tracker: Tracker,
        config: TrackerConfig,
        run: Path,
        put: Callable[[str, Json], None],
        tell: Callable[[str, bool], None],
    ) -> None:
        """`put` journals an entry and returns when it is on disk. `tell` gets a sentence, and whether it is a
        warning. Both are called from the thread."""
        self.config = config
        to = config.destination()
        self.title = f"{config.type_name} ({to})" if to else config.type_name
        self.error = ""
        """The error of the last attempt to send; empty if it succeeded."""
        self.over = threading.Event()
        """Set when the thread has ended, after `close`."""
        self._key = f"report/{config.type_name}-{content_hash(to)[:8]}"
        self._tracker, self._run, self._put, self._tell = tracker, run, put, tell
        self._wake = threading.Event()
        self._state: State | None = None
        self._is_open = self._is_abandoned = False
        self._sentences: set[str] = set()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether there was anything to send yet."""
        return self._thread is not None

    def wake(self) -> None:
        """Look for new records. The first call starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"etude-{self.title}", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self, state: State) -> None:
        """Send the remaining records and end. `over` is set when that is done."""
        self._state = state
        self.wake()

    def abandon(self) -> None:
        """End without waiting for the tracker."""
        self._is_abandoned = True
        self._wake.set()

    def counts(self) -> tuple[int, int]:
        """Return the number of records that were sent, and of all records. Raises StoreError."""
        with RunFolder.read(self._run) as run:
            keys = {record.key for record in list_records(run)}
            return len(self._sent_keys(run) & keys), len(keys)

    def _work(self) -> None:
        while not self._is_abandoned:
            self._wake.wait(timeout=_PAUSE)
            self._wake.clear()
            state = self._state
            try:
                self._serve()
                if state is not None:
                    if self._is_open:
                        self._tracker.close(state)
                    break
                self.error = ""
            except RequestError as error:
                self._note_failure(error)
                break  # Another try would fail in the same way.
            except Exception as error:  # noqa: BLE001  trackers raise whatever their networks do
                self._note_failure(error)
        self.over.set()

    def _serve(self) -> None:
        with RunFolder.read(self._run) as run:
            sent = self._sent_keys(run)
            for record in list_records(run, sent):
                if self._is_abandoned:
                    return
                if not self._is_open:
                    self._open(run)
                self._tracker.send(replace(record, number=len(sent)))
                self._put(f"{self._key}/sent/{record.key}", {"sent": True})
                sent.add(record.key)

    def _open(self, run: RunFolder) -> None:
        stored = run.journal.get(f"{self._key}/run")
        if stored is None:
            stored = {"token": secrets.token_hex(8), "tracker": self.title}
            self._put(f"{self._key}/run", stored)
        where = self._tracker.open(
            TrackedRun(
                name=run.name,
                folder=run.path,
                token=str(stored["token"]),
                config=stored_data(run.path, required=False),
                environment=run.read_json("environment.json") or {},
            )
        )
        self._is_open = True
        if where:
            self._say_once(f"{self.title}: {where}")

    def _sent_keys(self, run: RunFolder) -> set[str]:
        """Return the keys of the records that were sent."""
        prefix = f"{self._key}/sent/"
        return {key.removeprefix(prefix) for key, row in run.journal.scan(prefix) if row["sent"]}

    def _note_failure(self, error: Exception) -> None:
        self._is_open = False
        text = first_line(error)
        kind = type(error).__name__
        self.error = text if isinstance(error, EtudeError) else f"{kind}: {text}" if text else kind
        self._say_once(
            f"{self.title} accepts no records: {self.error}. The run continues, and sends them later",
            warning=True,
        )

    def _say_once(self, text: str, *, warning: bool = False) -> None:
        if text not in self._sentences:
            self._sentences.add(text)
            self._tell(text, warning)


class Reporting:
    """The trackers of an open run, as a context manager. Nothing is sent before `wake`."""

    def __init__(self, config: Config, run: RunFolder, progress: Progress) -> None:
        self._config, self._run, self._progress = config, run, progress
        self._readers: list[TrackerReader] = []
        self._exits = AsyncExitStack()

    def wake(self) -> None:
        """Let the trackers look for new records in the journal. Returns at once."""
        for reader in self._readers:
            reader.wake()

    async def __aenter__(self) -> Self:
        """Build the trackers. Raises RequestError if one cannot be built, for example without its extra."""
        loop = asyncio.get_running_loop()
        builder = await self._exits.enter_async_context(Builder(self._config, self._run))
        journal = self._run.journal

        def put(key: str, value: Json) -> None:
            if loop.is_closed():
                raise StoreError(f"{journal.path}: the run is over")
            asyncio.run_coroutine_threadsafe(journal.put(key, value), loop).result(timeout=_SECONDS_TO_STORE)

        def tell(text: str, warning: bool) -> None:
            # Nobody listens on a closed loop.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: self._progress.message(text, warning=warning))

        for each, config in zip(await builder.get_trackers(), self._config.report, strict=True):
            self._readers.append(TrackerReader(each, config, self._run.path, put, tell))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stop = not isinstance(error, Exception) or isinstance(error, BudgetReached)
        state: State = "finished" if error is None else "stopped" if is_stop else "failed"
        # A run that failed before anything was journalled has nothing to show.
        readers = [reader for reader in self._readers if error is None or reader.is_started]
        try:
            for reader in readers:
                reader.close(state)
            await asyncio.gather(*(self._report_end(reader, state) for reader in readers))
        finally:
            await self._exits.aclose()

    async def _report_end(self, reader: TrackerReader, state: State) -> None:
        seconds = min(tracker.PATIENCE, _SECONDS_AFTER_STOP) if state == "stopped" else tracker.PATIENCE
        await asyncio.to_thread(reader.over.wait, seconds)
        reader.abandon()
        sent, records = reader.counts()
        if sent < records:
            why = reader.error or f"the rest could not be sent within {seconds:g} s after its end"
            self._progress.message(
                f"{reader.title} has {sent} of {records} records of the run ({why}). Send "
                f"the rest with: etude resume {shlex.quote(str(self._run.path))}",
                warning=True,
            )


def with_trackers(config: Config, report: Any) -> Config:
    """Return the config with the trackers that a program gives now. Raises ConfigError."""
    if report is None:
        return config
    given = report if isinstance(report, list | tuple) else [report]
    sources: list[Any] = []
    for each in given:
        if not isinstance(each, str | dict | TrackerConfig):
            as_tracker(each)  # Raises RequestError if it is none.
            name = getattr(each, "__name__", type(each).__name__)
            each = LiveTrackerConfig(name=name, value=each)
        sources.append(each)
    trackers = parse_trackers(sources, config)
    there = {(each.type_name, each.destination()) for each in trackers}
    kept = [
        each
        for each in config.report
        if not isinstance(each, LiveTrackerConfig) and (each.type_name, each.destination()) not in there
    ]
    return config.model_copy(update={"report": [*kept, *trackers]})
