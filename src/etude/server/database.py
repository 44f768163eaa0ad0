"""The server's SQLite database: files, jobs, events, checkpoints and models."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.core.errors import StoreError
from etude.store.database import store_error

SCHEMA_VERSION = 1
_BUSY_SECONDS = 20
_METADATA = sa.MetaData()


def _table(name: str, *columns: sa.Column[object] | sa.UniqueConstraint) -> sa.Table:
    """A table whose rows have a number, in the order in which they came, and a name for the outside."""
    return sa.Table(
        name,
        _METADATA,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("created", sa.Float, nullable=False),
        *columns,
        sqlite_autoincrement=True,
    )


FILES = _table(
    "files",
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Column("method", sa.Text),
    sa.Column("rows", sa.Integer, nullable=False),
)
"""`method` and `rows` of training files: what they are for, and how many lines they have."""

JOBS = _table(
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
    sa.Column("estimated_finish", sa.Float),
    sa.Column("trained_tokens", sa.Integer),
    sa.Column("result_files", sa.JSON, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
)
"""`attempts` counts the workers that were started since the last checkpoint."""

EVENTS = _table(
    "events",
    sa.Column("job", sa.Text, nullable=False, index=True),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", sa.JSON),
    sa.Column("once", sa.Text),
    sa.UniqueConstraint("job", "once"),
)
"""`once` names what an event tells of: a step that is taken again after a crash is told once."""

MODELS = _table(
    "models",
    sa.Column("job", sa.Text, nullable=False, index=True),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("lora", sa.JSON),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("step", sa.Integer),
    sa.Column("metrics", sa.JSON, nullable=False),
)
"""`id` is the name that clients use; `step` is set for checkpoints, and null for what a job made."""

ART_MODELS = _table(
    "art_models",
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("base", sa.Text, nullable=False),
)
"""The models that ART's clients registered, by their names; `base` is the model that they began as."""

ART_STEPS = _table(
    "art_steps",
    sa.Column("model", sa.Text, nullable=False, index=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("served", sa.Text),
)
"""`id` is `<model>@<step>`. A step is there when it has a `served` model, or its `job` has made one: it comes
into being with the job's success, and whatever else the job comes to, it was never there."""


def open_database(path: Path) -> sa.Engine:
    """The engine of the database at `path`, made when it is new.

    Raises StoreError when it cannot be opened or is of another schema version.
    """
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": _BUSY_SECONDS})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if found not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"{path} has schema version {found}, and this etude reads version {SCHEMA_VERSION}; "
                    "use the etude that made it, or another --data-dir"
                )
            _METADATA.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
    except (sqlite3.Error, DBAPIError) as error:
        engine.dispose()
        raise store_error(path, getattr(error, "orig", None) or error) from error
    except OSError as error:
        raise StoreError(f"{path.parent}: {error.strerror}; choose another --data-dir") from error
    return engine
