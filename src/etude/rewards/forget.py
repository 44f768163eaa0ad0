"""Forgetting a step: the next one who takes it takes it anew."""

from __future__ import annotations

import asyncio

from etude.store.journal import Journal
from etude.store.writer import Delete


async def forget(journal: Journal, key: str) -> None:
    """Delete the value under this very key; returns when that is committed.

    `Journal.delete` would take the keys with it that begin alike: an episode's calls, and the
    episode `…/10` with the episode `…/1`. Raises StoreError when it cannot be done.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    journal._require_writer().submit(Delete(key, f"{key}\0", done))
    await done
