"""The thread that serves one tracker: it reads the run's journal, and sends what the tracker does not have.

A record is noted in the journal when it has been sent: one that was under way when the process was killed is
sent again. A tracker that is away is tried again after growing pauses, and holds up nobody.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from etude.config.component import TrackerConfig
from etude.core.errors import EtudeError, RequestError, first_line
from etude.core.keys import content_hash
from etude.store.journal import Json
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data
from etude.trackers.record import State, TrackedRun, Tracker
from etude.trackers.records import new_records, record_keys

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0


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
        self._key = f"report/{config.type_name}-{content_hash(to)[:8]}"
        self._tracker, self._run, self._put, self._tell = tracker, run, put, tell
        self._wake = threading.Event()
        self._state: State | None = None
        self._is_open = self._is_abandoned = False
        self._sentences: set[str] = set()
        self._tries = 0
        self._thread: threading.Thread | None = None

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

    def counts(self) -> tuple[int, int]:
        """How many records were sent, by the journal, and how many the run has. Raises StoreError."""
        with RunFolder.read(self._run) as run:
            keys = set(record_keys(run))
            return len(self._sent(run) & keys), len(keys)

    def _work(self) -> None:
        pause: float | None = None
        while not self._is_abandoned:
            self._wake.wait(timeout=_LONGEST_PAUSE if pause is None else pause)
            self._wake.clear()
            state = self._state
            try:
                self._serve()
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
            sent, config = self._sent(run), self.config
            for record in new_records(run, sent, episodes=config.episodes, checkpoints=config.checkpoints):
                if self._is_abandoned:
                    return
                if not self._is_open:
                    self._open(run)
                self._tracker.send(replace(record, number=len(sent)))
                self._put(f"{self._key}/sent/{record.key}", {"sent": True})
                sent.add(record.key)

    def _open(self, run: RunFolder) -> None:
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

    def _token(self, run: RunFolder) -> str:
        stored = run.journal.get(f"{self._key}/run")
        if stored is None:
            stored = {"token": secrets.token_hex(8), "tracker": self.title}
            self._put(f"{self._key}/run", stored)
        return str(stored["token"])

    def _sent(self, run: RunFolder) -> set[str]:
        """The keys of the records that were sent, those of epochs that the run has gone back from too."""
        prefix = f"{self._key}/sent/"
        return {key.removeprefix(prefix) for key, row in run.journal.scan(prefix) if row["sent"]}

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
