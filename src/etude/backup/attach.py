"""A run that is copied to its storage while it goes on, and once more at its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from etude.backup.address import Address, ask, probe
from etude.backup.copies import Copies, TakenOver
from etude.config.schema import StorageConfig
from etude.core.errors import RequestError, StoreError
from etude.core.interfaces import Progress
from etude.store.run_folder import RunFolder

_SECONDS_AFTER_FAILURE = 10.0
_LONGEST_SECONDS = 3600.0
"""That a copy may take while the run goes on; the next one has what it has written."""


@asynccontextmanager
async def backed_up(config: StorageConfig | None, run: RunFolder, progress: Progress) -> AsyncIterator[None]:
    """Copy the run every `interval` while the block runs, and at its end; without a config, nothing.

    Raises RequestError where a run that was never copied could not be, TakenOver when another folder goes on
    with it.
    """
    if config is None:
        yield
        return
    address = Address(f"{config.address}/{run.path.name}", config.driver_options())
    storage = _Storage(config, run, progress, Copies(run.path, address))
    await storage.begin()
    task = asyncio.create_task(storage.keep(), name="copy the run to its storage")
    try:
        yield
    except BaseException:
        await storage.end(task, min(config.patience, _SECONDS_AFTER_FAILURE))
        raise
    await storage.end(task, config.patience)


class _Storage:
    """The copying of one run."""

    def __init__(self, config: StorageConfig, run: RunFolder, progress: Progress, copies: Copies) -> None:
        self._config, self._run, self._progress, self._copies = config, run, progress, copies
        self._copied_at: float | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._over = asyncio.Event()

    async def begin(self) -> None:
        """Raise RequestError and TakenOver where the run is not to be begun."""
        try:
            await ask(self._config, self._copies.require_own)
            if self._copies.is_new:
                await probe(self._config)
        except RequestError as error:
            if self._copies.is_new:
                raise RequestError(f"{error}. Mend that, or begin without: -o storage=null") from error
            self._tell(error)

    async def keep(self) -> None:
        """Copy what is new again and again, until another folder has taken the run over."""
        while not isinstance(self._error, TakenOver):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.interval):
                    await self._over.wait()
                    return
            await self._copy(_LONGEST_SECONDS)

    async def end(self, task: asyncio.Task[None], seconds: float) -> None:
        """Copy the end of a run that has begun, and tell where that cannot be done in time."""
        self._over.set()
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        if not self._run.is_blank and not isinstance(self._error, TakenOver):
            with contextlib.suppress(StoreError):  # Why it cannot be written, whoever writes it says.
                await self._run.journal.flush()
            await self._copy(seconds)

    async def _copy(self, seconds: float) -> None:
        started = time.time()
        try:
            await ask(self._config.model_copy(update={"patience": seconds}), self._copies.copy)
        except (RequestError, StoreError) as error:
            self._failures += 1
            self._tell(error)
        else:
            self._copied_at = started
            self._tell(None)
        last_error = None if self._error is None else str(self._error)
        with contextlib.suppress(StoreError):  # A folder that cannot be written has worse to say elsewhere.
            self._copies.note(copied_at=self._copied_at, failures=self._failures, last_error=last_error)

    def _tell(self, error: Exception | None) -> None:
        """Tell that copies fail, or succeed again."""
        before, self._error = self._error, error
        where = f"storage {self._copies.address.text}"
        if error is not None and before is None:
            text = f"{where}: the run is not backed up: {error}. It goes on, and its folder has everything"
            self._progress.message(text, warning=True)
        elif error is None and before is not None:
            self._progress.message(f"{where} takes backups again", warning=False)
