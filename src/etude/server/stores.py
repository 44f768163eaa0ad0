"""The server's database and folders, as its workers see them: on its machine, or on another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from etude.cluster.launch import Seat
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


@contextmanager
def stores_here(settings: ServerSettings) -> Iterator[Stores]:
    """The stores of a database on this machine. Raises StoreError when it cannot be opened."""
    database = open_database(settings.data_dir / SERVER_DATABASE)
    try:
        names = [extension.names for extension in load_extensions()]
        models = ModelStore(database, settings.data_dir, settings.name, names)
        yield Stores(JobStore(database), FileStore(database, settings.data_dir), models)
    finally:
        database.dispose()


class StoresDesk:
    """The stores on the head, for processes on other machines, which cannot open the database."""

    def __init__(self, order: str) -> None:
        """`order` is a worker's. They are open for as long as the process lives."""
        self._context = stores_here(WorkerOrder.model_validate_json(order).settings)
        self._stores = self._context.__enter__()

    def ask(self, store: str, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of a store. Raises its errors."""
        return getattr(getattr(self._stores, store), method)(*args, **options)


def stores_at(seat: Seat) -> Stores:
    """The same for a process of a cluster: every call goes to the head. Raises HeadLost when used."""

    class Remote:
        def __init__(self, store: str) -> None:
            self._store = store

        def __getattr__(self, method: str) -> Callable[..., Any]:
            return partial(seat.call, "ask", self._store, method)

    return Stores(
        cast("JobStore", Remote("jobs")),
        cast("FileStore", Remote("files")),
        cast("ModelStore", Remote("models")),
    )
