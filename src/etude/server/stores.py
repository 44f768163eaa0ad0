"""The server's database and folders for its workers, on its own machine or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from sqlalchemy import Engine

from etude.cluster.launch import TeamMember
from etude.server.database import open_database
from etude.server.extensions import load_extensions
from etude.server.files import FileStore
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.settings import ServerSettings, WorkerOrder
from etude.store.files import SERVER_DATABASE


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores that a worker needs."""

    jobs: JobStore
    files: FileStore
    models: ModelStore


def _stores(settings: ServerSettings, database: Engine) -> Stores:
    names = [extension.names for extension in load_extensions()]
    models = ModelStore(database, settings.data_dir, settings.name, names)
    return Stores(JobStore(database), FileStore(database, settings.data_dir), models)


@contextmanager
def local_stores(settings: ServerSettings) -> Iterator[Stores]:
    """Yield the stores of a database on this machine. Raises StoreError if it cannot be opened."""
    database = open_database(settings.data_dir / SERVER_DATABASE)
    try:
        yield _stores(settings, database)
    finally:
        database.dispose()


def stores_for_order(order: str) -> Stores:
    """Return the stores for a worker's order. They stay open, as no other machine can open the database."""
    settings = WorkerOrder.model_validate_json(order).settings
    return _stores(settings, open_database(settings.data_dir / SERVER_DATABASE))


def remote_stores(seat: TeamMember) -> Stores:
    """Return stores for a process of a cluster: every call goes to the head. Raises HeadLost when used."""

    class Remote:
        def __init__(self, store: str) -> None:
            self._store = store

        def __getattr__(self, method: str) -> Callable[..., Any]:
            return partial(seat.call, f"{self._store}.{method}")

    return Stores(
        cast("JobStore", Remote("jobs")),
        cast("FileStore", Remote("files")),
        cast("ModelStore", Remote("models")),
    )
