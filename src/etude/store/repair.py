"""A damaged journal made whole again: what can be read of it is kept, and the run goes on from there."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from etude.core.errors import StoreError
from etude.store.database import DATABASE, PUT_ROW, open_database, store_error
from etude.store.files import draft_of
from etude.store.integrity import Row, damage_of, is_whole, rows_of
from etude.store.journal import Journal
from etude.store.lock import RunLock
from etude.store.log import logs_of
from etude.store.mark import mark_of
from etude.store.run_folder import LOCK


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome of a repair."""

    kept: int
    """Entries that are in it now."""
    copy: Path
    """The database as it was."""
    forgotten: int
    """Epochs that were recorded, and came after one whose record is lost: they are done again."""

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {**asdict(self), "copy": str(self.copy)}

    def line(self) -> str:
        """The facts in a sentence."""
        again = f"; {self.forgotten} epochs after the gap are done again" if self.forgotten else ""
        return (
            f"repaired: {self.kept} entries are whole and kept{again}. The database as it was is "
            f"{self.copy.name}"
        )


def check_run(run: Path) -> list[str]:
    """How the journal of a run is damaged, in sentences. Raises StoreError when the run is in use."""
    path = run / DATABASE
    with locked(run), closing(open_database(path)) as connection:
        damage = damage_of(path, connection)
    return [] if damage is None else damage.lines(path)


async def repair_run(run: Path) -> Repair:
    """Make the journal of a run whole. Raises StoreError when the run is in use, or nothing can be read."""
    path = run / DATABASE
    with locked(run):
        copy = _new_copy(path)
        with draft_of(path) as draft:
            kept = _salvage(path, draft)
            # By its name SQLite would take the log that belongs to the old file for this one's.
            for part in ("-wal", "-shm"):
                path.with_name(path.name + part).unlink(missing_ok=True)
        mark_of(path).unlink(missing_ok=True)
        with Journal(path) as journal:
            forgotten = sum([await log.keep_unbroken() for log in logs_of(journal)])
    return Repair(kept, copy, forgotten)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run while it is looked at. Raises StoreError when it is in use."""
    lock = RunLock(run / LOCK)
    try:
        yield
    finally:
        lock.release()


def _new_copy(path: Path) -> Path:
    """A copy of the database and its log, made one file where that goes."""
    with suppress(StoreError, sqlite3.DatabaseError), closing(open_database(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    names = (f"{path.name}.damaged-{number}" for number in count(1))
    copy = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    try:
        shutil.copy2(path, copy)
    except OSError as error:
        raise StoreError(f"{copy} cannot be written: {error.strerror}; free some space") from error
    return copy


def _salvage(path: Path, draft: Path) -> int:
    """Write all rows that are whole to a new database; how many there are."""
    rows: dict[int, Row] = {}
    with closing(sqlite3.connect(path)) as damaged:
        for order in ("ASC", "DESC"):
            # From both ends as far as pages can be read.
            with suppress(sqlite3.DatabaseError):
                for row in rows_of(damaged, order):
                    if row[0] in rows:
                        break
                    if is_whole(row):
                        rows[row[0]] = row
    ordered = [rows[number] for number in sorted(rows)]
    with closing(open_database(draft)) as whole:
        try:
            whole.execute("BEGIN")
            whole.executemany(
                PUT_ROW,
                ((key.decode(), value.decode(), created, crc) for _, key, value, created, crc in ordered),
            )
            whole.execute("COMMIT")
            whole.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise store_error(draft, error) from error
    return len(ordered)
