"""The server's SQLite database: tables, row ids, and lists in pages."""

import secrets
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.core.errors import StoreError
from etude.store.files import open_private
from etude.wire.http_server import ApiError

SCHEMA_VERSION = 3
_BUSY_SECONDS = 20
METADATA = sa.MetaData()
"""All tables of the database. `open_database` creates missing ones."""

Row: TypeAlias = dict[str, Any]
Page: TypeAlias = tuple[Sequence[Row], bool]
"""Some rows, and whether there are more."""
Order: TypeAlias = Literal["asc", "desc"]


def table(name: str, *columns: sa.Column[object] | sa.UniqueConstraint) -> sa.Table:
    """Return a table whose rows have a number, in order of creation, and a public id."""
    return sa.Table(
        name,
        METADATA,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("created", sa.Float, nullable=False),
        *columns,
        sqlite_autoincrement=True,
    )


FILES = table(
    "files",
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("rows", sa.Integer, nullable=False),
)
"""`method` is the method that the rows are for."""

JOBS = table(
    "jobs",
    sa.Column("status", sa.Text, nullable=False, index=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("training_file", sa.Text, nullable=False),
    sa.Column("validation_file", sa.Text),
    sa.Column("suffix", sa.Text),
    sa.Column("seed", sa.Integer, nullable=False),
    sa.Column("hyperparameters", sa.JSON, nullable=False),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("idempotency_key", sa.Text, unique=True),
    sa.Column("request_hash", sa.Text, nullable=False),
    sa.Column("error", sa.JSON),
    sa.Column("fine_tuned_model", sa.Text),
    sa.Column("finished", sa.Float),
    sa.Column("trained_tokens", sa.Integer),
    sa.Column("news_read", sa.Integer, nullable=False),
)
"""`news_read` is the position in the news of the job's processes up to which they are in `events`."""

EVENTS = table(
    "events",
    sa.Column("job", sa.Text, nullable=False, index=True),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", sa.JSON),
    sa.Column("once", sa.Text),
    sa.UniqueConstraint("job", "once"),
)
"""`once` names an event's subject. A step that runs again after a crash keeps one event."""

MODELS = table(
    "models",
    sa.Column("job", sa.Text, nullable=False, index=True),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("lora", sa.JSON),
    sa.Column("digest", sa.Text, nullable=False),
)
"""`id` is the name that clients use."""


def open_database(path: Path) -> sa.Engine:
    """Return the engine of the database at `path`, which is created if missing.

    Raises StoreError if it cannot be opened or has another schema version.
    """
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": _BUSY_SECONDS})
    try:
        if not path.exists():
            open_private(path, "ab").close()  # SQLite gives its log and index the same mode.
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"{path} has schema version {version}, but this etude reads version {SCHEMA_VERSION}; "
                    "use the version of etude that made it, or another --data-dir"
                )
            METADATA.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
    except (sqlite3.Error, DBAPIError) as error:
        engine.dispose()
        reason = error.orig if isinstance(error, DBAPIError) else error
        raise StoreError(f"{path} cannot be used: {reason}; choose another --data-dir") from error
    return engine


def fetch_row(engine: sa.Engine, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> Row | None:
    """Return the first row that meets the conditions."""
    with engine.connect() as connection:
        row = connection.execute(sa.select(table).where(*conditions)).mappings().first()
    return None if row is None else dict(row)


def require_row(engine: sa.Engine, table: sa.Table, id: str, kind: str, code: str, param: str = "id") -> Row:
    """Return the row with an id. Raises ApiError 404, with the `kind` of object that is missing."""
    if (row := fetch_row(engine, table, table.c.id == id)) is None:
        raise ApiError(404, f"there is no {kind} {id!r}", param=param, code=code)
    return row


def fetch_page(
    engine: sa.Engine,
    table: sa.Table,
    *conditions: sa.ColumnElement[bool],
    after: str | None,
    limit: int,
    order: Order = "desc",
) -> Page:
    """Return up to `limit` rows, and whether there are more. Raises ApiError if row `after` is unknown."""
    number = table.c.number if order == "asc" else -table.c.number
    query = sa.select(table).where(*conditions).order_by(number).limit(limit + 1)
    with engine.connect() as connection:
        if after is not None:
            start = connection.execute(sa.select(number).where(table.c.id == after, *conditions)).scalar()
            if start is None:
                message = f"there is no {after!r} to continue after"
                raise ApiError(400, message, param="after", code="invalid_value")
            query = query.where(number > start)
        rows = [dict(row) for row in connection.execute(query).mappings()]
    return rows[:limit], len(rows) > limit


def list_object(page: Page, shown: Callable[[Row], Row]) -> Row:
    """Return the list object of a page, with each row converted by `shown`."""
    data, has_more = [shown(row) for row in page[0]], page[1]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, "first_id": None, "last_id": None} | ends


def new_id(kind: str) -> str:
    """Return a new id, such as `file-…`, `ftjob-…` or `ftevent-…`."""
    return f"{kind}-{secrets.token_hex(12)}"
