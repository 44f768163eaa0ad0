"""The thread that serves one tracker: it reads the run's journal, and sends what the tracker does not have.

Before a record is sent the journal says so, and after it that it was: a run that was killed in between asks
the tracker when it goes on. A tracker that is away is tried again after growing pauses, and holds up nobody.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from etude.config.component import TrackerConfig
from etude.core.errors import EtudeError, RequestError, first_line
from etude.core.keys import content_hash
from etude.store.journal import Json
from etude.store.run_folder import RunFolder
from etude.store.stored_config import evaluators_of, stored_data
from etude.trackers.live import EpisodeFeed
from etude.trackers.record import LiveTracker, RunRecord, State, TrackedRun, Tracker
from etude.trackers.records import Outline, outlines

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_LIVE_PAUSE = 2.0
"""Seconds between looks for episodes that are over."""
_EPISODES_AT_ONCE = 64
_PREFIX = "report/"


@dataclass(frozen=True, slots=True)
class Served:
    """How far a tracker has come with a run."""

    sent: int
    records: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all that there is."""
        return self.sent >= self.records


class TrackerReader:
    """Serves one tracker until it is closed."""

    def __init__(
        self,
        tracker: Tracker,
        config: TrackerConfig,
        run: Path,
        put: Callable[[str, Json], None],
        tell: Callable[[str, bool], None],
    ) -> None:
        """`put` journals an entry, and returns when that is on the disk. `tell` gets sentences, and whether
        they are warnings. Both are called from the thread."""
        self.config = config
        to = config.destination()
        self.title = f"{config.type_name} ({to})" if to else config.type_name
        self.error = ""
        """Why the last try to send anything failed; empty where it did not."""
        self.over = threading.Event()
        """Set when the thread has ended, after `close`."""
        self._key = f"{_PREFIX}{config.type_name}-{content_hash(to)[:8]}"
        self._tracker, self._run, self._put, self._tell = tracker, run, put, tell
        self._wake = threading.Event()
        self._state: State | None = None
        self._is_open = self._is_abandoned = False
        self._sentences: set[str] = set()
        self._tries = 0
        self._thread: threading.Thread | None = None
        self._live = tracker if isinstance(tracker, LiveTracker) else None
        evaluators = evaluators_of(stored_data(run, required=False)) if self._live else ()
        self._feed = EpisodeFeed(evaluators)

    @property
    def is_live(self) -> bool:
        """Whether it is to begin with the run: it shows episodes too."""
        return self._live is not None

    @property
    def is_started(self) -> bool:
        """Whether there was anything to send yet."""
        return self._thread is not None

    def wake(self) -> None:
        """Have it look for new records; the first time, begin."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"etude-{self.title}", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self, state: State) -> None:
        """Send what is left, and end; `over` says when that is done."""
        self._state = state
        self.wake()

    def abandon(self) -> None:
        """End without waiting for the tracker any more."""
        self._is_abandoned = True
        self._wake.set()

    def served(self) -> Served:
        """How far the tracker has come, by the journal. Raises StoreError."""
        with RunFolder.read(self._run) as run:
            sent, records = self._sent(run), outlines(run)
            there = sum(bool(sent.get(each.key, {}).get("sent")) for each in records)
            return Served(there, len(records))

    def _work(self) -> None:
        pause: float | None = None
        idle = _LIVE_PAUSE if self.is_live else _LONGEST_PAUSE
        while not self._is_abandoned:
            is_news = self._wake.wait(timeout=pause or idle)
            self._wake.clear()
            state = self._state
            try:
                if is_news or pause or not (self.is_live and self._is_open):
                    self._serve()
                else:
                    self._serve_episodes()
                if state is not None:
                    if self._is_open:
                        self._tracker.close(state)
                    break
                pause, self._tries, self.error = None, 0, ""
            except RequestError as error:
                self._failed(error)
                break  # Another try would fail in the same way.
            except Exception as error:  # noqa: BLE001  trackers raise whatever their networks do
                pause = self._failed(error)
        self.over.set()

    def _serve(self) -> None:
        with RunFolder.read(self._run) as run:
            sent, records = self._sent(run), outlines(run)
            if not self._is_open:
                there = [each for each in records if sent.get(each.key, {}).get("sent")]
                for outline in there:
                    self._feed.end(outline.part)
                is_news = self.is_live and bool(self._feed.ready(run.journal))
                if len(there) == len(records) and not is_news:
                    return
                self._open(run, records, sent)
            for outline in records:
                row = sent.get(outline.key)
                if row is not None and row["sent"]:
                    continue
                number = (
                    row["number"] if row else 1 + max((each["number"] for each in sent.values()), default=-1)
                )
                if outline.part:
                    self._send_episodes(self._feed.rest(run.journal, outline.part))
                self._send(outline, number)
                self._feed.end(outline.part)
                sent[outline.key] = {"number": number, "sent": True}
                if self._is_abandoned:
                    return
            self._send_episodes(self._feed.ready(run.journal))

    def _serve_episodes(self) -> None:
        with RunFolder.read(self._run) as run:
            self._send_episodes(self._feed.ready(run.journal))

    def _send_episodes(self, episodes: Iterable[str]) -> None:
        if self._live is None:
            return
        episodes = iter(episodes)
        while not self._is_abandoned and (batch := [*islice(episodes, _EPISODES_AT_ONCE)]):
            self._live.send_episodes(batch)
            self._feed.shown(batch)

    def _send(self, outline: Outline, number: int) -> None:
        self._note(outline.key, number, sent=False)
        record = outline.read(self.config.episodes, self.config.checkpoints)
        self._tracker.send(replace(record, number=number))
        self._note(outline.key, number, sent=True)

    def _open(self, run: RunFolder, records: list[Outline], sent: dict[str, dict[str, Any]]) -> None:
        where = self._tracker.open(
            TrackedRun(
                name=run.name,
                folder=run.path,
                token=self._token(run),
                config=stored_data(run.path, required=False),
                environment=run.read_json("environment.json") or {},
            )
        )
        self._is_open = True
        if where:
            self._say_once(f"{self.title}: {where}")
        known = {each.key: each for each in records}
        for key, row in sorted(sent.items(), key=lambda pair: -pair[1]["number"]):
            if key not in known:
                continue  # Of an epoch that the run has gone back from.
            record: RunRecord = replace(known[key].read(0, False), number=row["number"])
            is_there = self._tracker.has(record)
            if is_there is None:
                is_there = row["sent"]
            if is_there and not row["sent"]:
                self._note(key, row["number"], sent=True)
            row["sent"] = is_there
            if is_there:
                return

    def _token(self, run: RunFolder) -> str:
        stored = run.journal.get(f"{self._key}/run")
        if stored is None:
            stored = {"token": secrets.token_hex(8), "tracker": self.title}
            self._put(f"{self._key}/run", stored)
        return str(stored["token"])

    def _sent(self, run: RunFolder) -> dict[str, dict[str, Any]]:
        prefix = f"{self._key}/sent/"
        return {key.removeprefix(prefix): value for key, value in run.journal.scan(prefix)}

    def _note(self, key: str, number: int, *, sent: bool) -> None:
        row: Mapping[str, Json] = {"number": number, "sent": sent}
        self._put(f"{self._key}/sent/{key}", dict(row))

    def _failed(self, error: Exception) -> float:
        self._is_open = False
        text = first_line(error)
        kind = type(error).__name__
        self.error = text if isinstance(error, EtudeError) else f"{kind}: {text}" if text else kind
        self._say_once(
            f"{self.title} takes nothing: {self.error}. The run goes on, and what is missing is sent later",
            warning=True,
        )
        self._tries += 1
        return float(min(_FIRST_PAUSE * 2 ** min(self._tries, 10), _LONGEST_PAUSE))

    def _say_once(self, text: str, *, warning: bool = False) -> None:
        if text not in self._sentences:
            self._sentences.add(text)
            self._tell(text, warning)
