"""The thread that backs a run up while it goes on, and what is known of how that goes.

A storage that is away, slow or full neither ends a run nor holds it up longer than it says it waits: failures
are counted, told once per cause, and tried again after growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from etude.backup.address import Address
from etude.backup.changes import position_of
from etude.backup.manifest import Superseded
from etude.backup.writer import BackupWriter
from etude.config.storage import StorageConfig
from etude.core.errors import EtudeError, RequestError, StoreError
from etude.store.database import DATABASE
from etude.store.facts import STORAGE
from etude.store.files import write_atomically

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0


class Replicator:
    """Backs one run up until it is closed."""

    def __init__(
        self,
        run: Path,
        config: StorageConfig,
        tell: Callable[[str, bool], None],
        superseded: Callable[[Superseded], None],
    ) -> None:
        """`tell` gets sentences, and whether they are warnings; both are called from the thread.

        Raises RequestError when the address cannot be used here.
        """
        self.config = config
        self.address = f"{config.address}/{run.name}"
        self.first_try: Future[None] = Future()
        """Over when a backup was made for the first time, or could not be."""
        self._run = run
        self._writer = BackupWriter(run, Address(self.address, config.driver_options()), config.interval)
        self._tell, self._superseded = tell, superseded
        self._wanted: list[Future[None]] = []
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._is_closing = self._is_withdrawn = False
        self._over: Future[None] = Future()
        self._acknowledged_at: float | None = None
        self._backups, self._seconds = 0, 0.0
        self._causes: Counter[str] = Counter()
        self._failed_since: float | None = None
        self._last_error = ""
        self._tries = 0
        """Failures since the last backup."""
        threading.Thread(target=self._work, name=f"etude-storage {run}", daemon=True).start()

    @property
    def is_new(self) -> bool:
        """Whether the run folder was never backed up before this process began."""
        return self._writer.is_new

    def request(self) -> Future[None]:
        """Over when everything that is committed now is backed up."""
        future: Future[None] = Future()
        with self._lock:
            self._wanted.append(future)
        self._wake.set()
        return future

    async def wait(self, seconds: float) -> bool:
        """Wait until all that is committed now is backed up, at most so long; whether it is."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wrap_future(self.request())
        except TimeoutError:
            return False
        return True

    async def epoch_over(self) -> None:
        """Wait for the backup where the config says so, and backups do not fail anyway."""
        if not self.config.wait or self._failed_since is not None:
            return
        if not await self.wait(self.config.patience):
            self._tell(
                f"storage {self.address}: the epoch is not backed up after {self.config.patience:g} s; the "
                "run goes on",
                True,
            )

    def close(self) -> None:
        """Have the thread end after what it is doing now. Nobody waits for it."""
        self._is_closing = True
        self._wake.set()

    async def withdraw(self, seconds: float) -> None:
        """Delete the backup of a run that is not begun after all; what is still there after so long stays."""
        self._is_withdrawn = True
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.wrap_future(self._over)

    def figures(self) -> dict[str, Any]:
        """How the backup stands: as metrics of an epoch, and for the run's status."""
        last = self._writer.last
        position = 0 if last is None else last.position
        # A journal that is being closed has no figures.
        with contextlib.suppress(EtudeError):
            position = position_of(self._run / DATABASE)
        behind = position - (0 if last is None else last.position)
        lag = 0.0 if not behind or self._acknowledged_at is None else time.time() - self._acknowledged_at
        return {
            "entries_behind": behind,
            "lag_seconds": round(lag, 3),
            "backups": self._backups,
            "bytes_written": self._writer.bytes_written,
            "seconds": round(self._seconds, 3),
            "failures": self._causes.total(),
        }

    def _work(self) -> None:
        while not self._is_closing:
            with self._lock:
                wanted, self._wanted = self._wanted, []
            pause = self._try(wanted)
            self._write_status()
            self._wake.wait(pause)
            self._wake.clear()
        if self._is_withdrawn:
            try:
                self._writer.withdraw()
            except Exception as error:  # noqa: BLE001  as in `_try`
                self._note(f"the backup of a run that was not begun stays: {_sentence(error)}", "withdraw")
        if self._over.set_running_or_notify_cancel():
            self._over.set_result(None)

    def _try(self, wanted: list[Future[None]]) -> float:
        """Back up once; how long to pause after it."""
        started, began_at = time.monotonic(), time.time()
        try:
            before = self._writer.last
            after = self._writer.back_up()
            self._backups += after is not before
            self._acknowledged_at = began_at
            if not self.first_try.done():
                self.first_try.set_result(None)
        except Exception as error:  # noqa: BLE001  fsspec's drivers raise whatever their networks do
            if self._is_final(error):
                self._is_closing = True
                self._settle(error)
                return 0.0
            with self._lock:
                self._wanted = [*wanted, *self._wanted]
            self._settle(error)
            return self._failed(error)
        finally:
            self._seconds += time.monotonic() - started
        self._succeeded(wanted)
        return self.config.interval

    def _succeeded(self, wanted: list[Future[None]]) -> None:
        for future in wanted:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        self._tries = 0
        if self._failed_since is not None:
            seconds, self._failed_since = time.monotonic() - self._failed_since, None
            self._tell(f"storage {self.address} takes backups again, after {seconds:.0f} s", False)
        try:
            self._writer.tidy()
        except Exception as error:  # noqa: BLE001  as above; the backup counts all the same
            self._note(
                f"what is no longer needed cannot be deleted: {_sentence(error)}", type(error).__name__
            )

    def _is_final(self, error: Exception) -> bool:
        """Whether there is nothing more to try: the run ends by it, or is not begun."""
        is_beginning = not self.first_try.done()
        return isinstance(error, Superseded) or (
            is_beginning and (self.is_new or isinstance(error, RequestError))
        )

    def _settle(self, error: Exception) -> None:
        """Tell who waits for the first try, or who runs, that there is no backup."""
        if not self.first_try.done():
            self.first_try.set_exception(error)
        elif isinstance(error, Superseded):
            self._superseded(error)

    def _failed(self, error: Exception) -> float:
        if self._failed_since is None:
            self._failed_since = time.monotonic()
        self._last_error = _sentence(error)
        code = getattr(error, "errno", None)
        cause = type(error).__name__ if code is None else f"{type(error).__name__} {code}"
        self._note(
            f"the run cannot be backed up: {self._last_error}. It goes on, and this is tried again", cause
        )
        self._tries += 1
        return float(min(_FIRST_PAUSE * 2 ** min(self._tries, 10), _LONGEST_PAUSE))

    def _note(self, text: str, cause: str) -> None:
        self._causes[cause] += 1
        if self._causes[cause] == 1:
            self._tell(f"storage {self.address}: {text}", True)

    def _write_status(self) -> None:
        last = self._writer.last
        status = {
            "address": self.address,
            "backup": None if last is None else last.number,
            "acknowledged_at": self._acknowledged_at,
            "last_error": self._last_error if self._failed_since is not None else None,
            "causes": dict(self._causes),
            **self.figures(),
        }
        # A folder that cannot be written has worse to say elsewhere.
        with contextlib.suppress(StoreError):
            write_atomically(self._run / STORAGE, json.dumps(status, indent=2) + "\n")


def _sentence(error: Exception) -> str:
    text = str(error).strip()
    kind = type(error).__name__
    return text if isinstance(error, EtudeError) else f"{kind}: {text}" if text else kind
