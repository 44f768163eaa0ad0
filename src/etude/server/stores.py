"""The server's database and folders for its workers, on its own machine or another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from etude.processes.ray_teams import TeamMember
from etude.server.database import open_database
from etude.server.extensions import load_extensions
from etude.server.files import FileStore
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.settings import WorkerOrder
from etude.store.files import SERVER_DATABASE


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores that a worker needs."""

    jobs: JobStore
    files: FileStore
    models: ModelStore


def open_stores(order: str) -> Stores:
    """Return the stores for a worker's order, as JSON. They stay open until this process ends.

    Raises StoreError if the database cannot be opened.
    """
    settings = WorkerOrder.model_validate_json(order).settings
    database = open_database(settings.data_dir / SERVER_DATABASE)
    names = [extension.names for extension in load_extensions()]
    models = ModelStore(database, settings.data_dir, settings.name, names)
    return Stores(JobStore(database), FileStore(database, settings.data_dir), models)


class _Remote:
    """A store at the head."""

    def __init__(self, seat: TeamMember, store: str) -> None:
        self._seat, self._store = seat, store

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._seat.call, f"{self._store}.{method}")


def remote_stores(seat: TeamMember) -> Stores:
    """Return stores for a process of a cluster: every call goes to the head. Raises HeadLost when used."""
    return Stores(*(cast("Any", _Remote(seat, store)) for store in ("jobs", "files", "models")))
