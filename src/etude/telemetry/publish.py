"""Publishing a run's status in its folder, for as long as the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from etude.config.schema import MetricsConfig
from etude.core.errors import StoreError
from etude.core.secrets import masked
from etude.store.files import draft_of
from etude.store.status import STATUS, ClusterStatus, RunStatus
from etude.telemetry.prometheus import MetricsServer, served
from etude.telemetry.snapshot import Parts, snapshot

_SECONDS = 1.0
_CLUSTER_SECONDS = 5.0
"""Between two looks at the nodes of a cluster."""
_MOST_TIME = 0.02
"""The share of its time that the head may spend on looking, where it has many runners."""


@asynccontextmanager
async def published(parts: Parts, metrics: MetricsConfig | None) -> AsyncIterator[None]:
    """Within the block the run's status is in its folder, and at its metrics' address where it has one.

    Raises RequestError where that address cannot be had.
    """
    async with served(metrics) as server:
        publishing = asyncio.ensure_future(_publish(parts, server))
        try:
            yield
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            (parts.run.path / STATUS).unlink(missing_ok=True)


async def _publish(parts: Parts, server: MetricsServer | None) -> None:
    since, looked = time.time(), -_CLUSTER_SECONDS
    cluster: ClusterStatus | None = None
    while True:
        if parts.cluster is not None and time.monotonic() - looked >= _CLUSTER_SECONDS:
            looked, before = time.monotonic(), cluster
            cluster = await asyncio.to_thread(parts.cluster) or before
            if before is None and cluster is not None and cluster.dashboard is not None:
                parts.counts.message(f"the cluster's dashboard: {cluster.dashboard}")
        begun = time.thread_time()
        status = snapshot(parts, since, cluster, None if server is None else server.address)
        seconds = time.thread_time() - begun
        if server is not None:
            server.status = status
        writing = asyncio.ensure_future(asyncio.to_thread(_write, parts.run.path / STATUS, status))
        try:
            await asyncio.shield(writing)
        except StoreError:
            pass  # A full disk is told of by the journal.
        finally:
            # A thread cannot be cancelled, and must not write once the status is deleted.
            await asyncio.gather(writing, return_exceptions=True)
        await asyncio.sleep(max(_SECONDS, seconds / _MOST_TIME))


def _write(path: Path, status: RunStatus) -> None:
    """In full or not at all; not synced, for what is lost with the machine is of no use after it."""
    with draft_of(path, sync=False) as draft:
        draft.write_text(masked(status.model_dump_json(indent=1)) + "\n", encoding="utf-8")
