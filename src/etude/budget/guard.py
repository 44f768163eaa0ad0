"""The guard: opens the ledger of a run, and ends the run's work when it is at a limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeAlias

from etude.budget.gpus import gpus_held
from etude.budget.ledger import Ledger
from etude.budget.meter import metered
from etude.budget.prices import require_bounded
from etude.config.schema import Config
from etude.core.interfaces import Engine, Progress
from etude.store.episodes import stored_episodes
from etude.store.run_folder import RunFolder

Meter: TypeAlias = Callable[[str, Engine], AbstractContextManager[None]]
"""Has the calls of an entry's engine counted while it is open."""

_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.5
"""For answers that have just come to get into the journal."""


def open_ledger(config: Config, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> Ledger:
    """The ledger of a run, with what it has taken before.

    Raises RequestError for a budget that could not be kept, ConfigError for prices that cannot be read.
    """
    require_bounded(config)
    counts_episodes = config.budget is not None and config.budget.episodes is not None
    episodes = sum(1 for _ in stored_episodes(run.journal)) if counts_episodes else 0
    return Ledger(run.journal, config, gpus=gpus_held(config), episodes=episodes, clock=clock)


def meter_of(ledger: Ledger, config: Config) -> Meter:
    """For a builder, to be opened around each engine that it builds."""
    return lambda name, engine: metered(name, engine, ledger, config.llms)


@contextlib.contextmanager
def all_metered(engines: Mapping[str, Engine], meter: Meter) -> Iterator[None]:
    """Have the calls of engines counted that no builder has made."""
    with contextlib.ExitStack() as exits:
        for name, engine in engines.items():
            exits.enter_context(meter(name, engine))
        yield


@asynccontextmanager
async def within_budget(ledger: Ledger, progress: Progress) -> AsyncIterator[None]:
    """End the block with BudgetReached when the run has to stop; the time within it counts.

    Whatever is under way in the block then is cancelled, as by Ctrl-C. It is the innermost block: all that
    the work needs is closed after it.
    """
    looking = asyncio.ensure_future(_look(ledger, progress))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            ledger.on_reached = lambda: scope.reschedule(loop.time() + _LAST_WORDS_SECONDS)
            ledger.tick()
            yield
    except BaseException as error:
        if ledger.reached is not None and scope.expired():
            raise ledger.reached from error
        raise
    finally:
        ledger.on_reached = lambda: None
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        with contextlib.suppress(Exception):  # The journal may be what failed.
            if ledger.bill.lines:
                ledger.store_time()


async def _look(ledger: Ledger, progress: Progress) -> None:
    while True:
        progress.spent(ledger.figures())
        await asyncio.sleep(_LOOK_SECONDS)
        ledger.tick()
