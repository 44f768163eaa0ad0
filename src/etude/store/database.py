"""Opening the SQLite database of a run, and putting its errors into words."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.core.errors import StoreError

SCHEMA_VERSION = 1
"""Written to every run.db. A database of another version is refused, never guessed at."""

_BUSY_SECONDS = 10

_METADATA = sa.MetaData()

STEPS = sa.Table(
    "steps",
    _METADATA,
    sa.Column("key", sa.Text, primary_key=True, nullable=False),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
"""One row per journalled step: its key, its value as JSON, and when it was stored (Unix seconds)."""

_ADVICE = {
    "SQLITE_FULL": "the disk is full; free some space and resume the run, all that was stored is kept",
    "SQLITE_IOERR": "the disk does not take the data (full, over quota, or failing); "
    "free some space and resume the run, all that was stored is kept",
    "SQLITE_BUSY": "another program holds the database locked; close it and resume the run",
    "SQLITE_LOCKED": "another program holds the database locked; close it and resume the run",
    "SQLITE_CORRUPT": "the file is damaged; copy the run folder away and start a new run",
    "SQLITE_NOTADB": "the file is not a run database; check the path, or start a new run",
    "SQLITE_READONLY": "the file may not be written; check the permissions of the run folder",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that the folder exists and its permissions",
}


def open_database(path: Path, *, read_only: bool = False) -> sa.Engine:
    """The engine of the database at `path`, made and given its tables when it is new.

    Raises StoreError when it cannot be opened, is damaged, or has another schema version.
    """
    if read_only and not path.is_file():
        raise StoreError(f"{path} does not exist: there is no run to read here")
    mode = "?mode=ro" if read_only else ""
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(
            f"{path.absolute().as_uri()}{mode}",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        ),
        poolclass=sa.pool.NullPool,
    )
    try:
        with engine.connect() as connection:
            _prepare(connection, path, read_only=read_only)
    except (sqlite3.Error, DBAPIError) as error:
        engine.dispose()
        raise store_error(path, error) from error
    except StoreError:
        engine.dispose()
        raise
    return engine


def _prepare(connection: sa.Connection, path: Path, *, read_only: bool) -> None:
    found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if found not in (0, SCHEMA_VERSION) or (found == 0 and read_only):
        raise StoreError(
            f"{path} has schema version {found}, and this version of etude reads version {SCHEMA_VERSION}. "
            f"Use the etude that made the run (see environment.json beside it), or start a new run."
        )
    if read_only:
        return
    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    if found == 0:
        _METADATA.create_all(connection)
        connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")


def store_error(path: Path, error: sqlite3.Error | DBAPIError) -> StoreError:
    """The error in words: what happened to which file, and what to do."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    name = getattr(origin, "sqlite_errorname", "") or ""
    advice = next((text for prefix, text in _ADVICE.items() if name.startswith(prefix)), None)
    return StoreError(f"{path}: {advice} ({origin})" if advice else f"{path}: {origin}")
