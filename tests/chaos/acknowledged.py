"""A log of what a journal said it had stored, and what of that is not there any more."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

_SEED_SHIFT = 32
"""Of a call's key, as it is sent as the request's seed."""


def log_to(path: Path) -> None:
    """From now on write to `path` what this process's journal is about to store, and then that it has.

    A line is written at once, so that it outlives whatever becomes of the process.
    """
    from etude.store.database import Put, Writer

    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    write = Writer._write

    def logged(writer: Any, batch: list[Any]) -> None:
        kept = {each.key: zlib.crc32(each.text.encode()) for each in batch if isinstance(each, Put)}
        gone = [[each.first, _text(each.end)] for each in batch if each and not isinstance(each, Put)]
        os.write(file, f"{json.dumps({'kept': kept, 'gone': gone})}\n".encode())
        write(writer, batch)
        os.write(file, b'"done"\n')

    Writer._write = logged  # type: ignore[method-assign]


def is_answered(journal: Path, seed: int) -> bool:
    """Whether a journal has the answer of the paid model to a request of this seed."""
    if not journal.exists():
        return False
    query = "SELECT value FROM steps WHERE key LIKE '%/call/%'"
    try:
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10)) as connection:
            calls: list[dict[str, Any]] = [json.loads(text) for (text,) in connection.execute(query)]
    except sqlite3.OperationalError:  # The run is making its tables at this moment.
        return False
    return any(
        call.get("completion") and call["model"] == "helper" and call["key"] >> _SEED_SHIFT == seed
        for call in calls
    )


def lost_entries(log: Path, journal: Path) -> list[str]:
    """Entries that the journal had said were stored and that are not there, in words; later values may be."""
    allowed: dict[str, set[int | None]] = {}
    batch: dict[str, Any] = {"kept": {}, "gone": []}
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        is_done = entry == "done"
        batch = batch if is_done else entry
        gone = [
            key for key in allowed for first, end in batch["gone"] if first <= key < (end or "\U0010ffff")
        ]
        changes: dict[str, int | None] = dict.fromkeys(gone) | batch["kept"]
        for key, value in changes.items():
            # What was not acknowledged may be there or not.
            allowed[key] = {value} if is_done else allowed.get(key, {None}) | {value}
    if not any(None not in values for values in allowed.values()):
        return []
    there = _entries(journal)
    return [
        f"{key} is {'another' if key in there else 'not there'}"
        for key, values in allowed.items()
        if there.get(key) not in values
    ]


def _entries(journal: Path) -> dict[str, int]:
    """The checksums of the entries by their keys, read as a run would."""
    from etude.core.errors import StoreError
    from etude.store.journal import Journal

    if not journal.exists():
        return {}
    try:
        with Journal(journal, read_only=True) as opened:
            return {key: zlib.crc32(json.dumps(value).encode()) for key, value in opened.scan()}
    except StoreError:
        return {}


def _text(end: str | bytes) -> str:
    return end if isinstance(end, str) else ""
