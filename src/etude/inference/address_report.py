"""Telling in the run folder how the addresses of a run's models are, for as long as the run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from etude.core.errors import StoreError
from etude.core.interfaces import Engine
from etude.inference.routes import HasAddresses
from etude.store.addresses import AddressRow, write_report

_LOG = logging.getLogger("etude.routes")

_SECONDS = 1.0


@asynccontextmanager
async def reported_addresses(run: Path, engines: Mapping[str, Engine]) -> AsyncIterator[None]:
    """Within the block the report in the run folder is right to a second, and at its end to the last call.

    Where no model has several addresses there is none.
    """
    several = {
        name: engine
        for name, engine in engines.items()
        if isinstance(engine, HasAddresses) and engine.address_rows()
    }
    if not several:
        yield
        return
    report = _Report(run, several)
    task = asyncio.create_task(report.keep(), name="report addresses")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await report.write()


class _Report:
    def __init__(self, run: Path, engines: Mapping[str, HasAddresses]) -> None:
        self._run = run
        self._engines = engines
        self._written: dict[str, dict[str, AddressRow]] = {}

    async def keep(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(_SECONDS)

    async def write(self) -> None:
        """Write it where it has changed; a run goes on without it."""
        models = {name: engine.address_rows() for name, engine in self._engines.items()}
        if models == self._written:
            return
        try:
            await asyncio.to_thread(write_report, self._run, models)
        except StoreError as error:
            _LOG.warning("how the addresses are is not told: %s", error)
        self._written = models
