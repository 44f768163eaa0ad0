"""A run with its backup around it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from etude.backup.manifest import Superseded
from etude.backup.replicator import Replicator
from etude.config.storage import StorageConfig
from etude.core.errors import RequestError
from etude.core.interfaces import Progress
from etude.store.run_folder import RunFolder

_SECONDS_AFTER_FAILURE = 10.0


@asynccontextmanager
async def backed_up(
    config: StorageConfig | None, run: RunFolder, progress: Progress
) -> AsyncIterator[Replicator | None]:
    """Back the run up while the block runs, and at its end once more; without a config, nothing.

    Where the block raises RequestError before anything was journalled, the backup is deleted: it would only
    be in the way of the next try.

    Raises RequestError when a run that was never backed up cannot be at its beginning, and Superseded as soon
    as another head goes on with it.
    """
    if config is None:
        yield None
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    errors: list[Superseded] = []

    def tell(text: str, warning: bool) -> None:
        _from_thread(loop, lambda: progress.message(text, warning=warning))

    def superseded(error: Superseded) -> None:
        def stop() -> None:
            errors.append(error)
            if task is not None:
                task.cancel()

        _from_thread(loop, stop)

    replicator = Replicator(run.path, config, tell, superseded)
    try:
        await _begun(replicator, config)
        try:
            yield replicator
        except BaseException as error:
            if isinstance(error, RequestError) and replicator.is_new and run.is_blank:
                await replicator.withdraw(_SECONDS_AFTER_FAILURE)
            elif not errors:
                await _ended(replicator, run, min(config.patience, _SECONDS_AFTER_FAILURE), None)
            raise
        await _ended(replicator, run, config.patience, progress)
    except asyncio.CancelledError:
        if not errors:
            raise
        if task is not None:
            task.uncancel()
        raise errors[0] from None
    finally:
        replicator.close()


async def _begun(replicator: Replicator, config: StorageConfig) -> None:
    """Wait for the first backup, or for why there is none. Raises RequestError and Superseded."""
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(config.patience):
                await asyncio.wrap_future(replicator.first_try)
        except (RequestError, Superseded):
            raise
        except Exception as error:  # whatever the driver raises
            if replicator.is_new:
                raise RequestError(
                    f"the run cannot be backed up to {replicator.address}: {error}. Mend that, or begin "
                    "without: -o storage=null"
                ) from error


async def _ended(replicator: Replicator, run: RunFolder, seconds: float, progress: Progress | None) -> None:
    """Back up the end of the run; tell where that cannot be done in time."""
    await run.journal.flush()
    if await replicator.wait(seconds) or progress is None:
        return
    behind = replicator.figures()["entries_behind"]
    progress.message(
        f"storage {replicator.address}: entries of the journal that are not backed up after {seconds:g} s: "
        f"{behind}. The run folder has all of them; to try again: etude resume {shlex.quote(str(run.path))}",
        warning=True,
    )


def _from_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    # A closed loop has nobody left who listens.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work)
