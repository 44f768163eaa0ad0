"""How far a journal has come, kept beside it, so that a journal which has lost its end is noticed.

SQLite ignores a write-ahead log that is gone or cut off, without a word: to it the last commit is the last
one that it can read.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from etude.core.errors import StoreError


class Mark:
    """The number of the last row that was committed; never ahead of the disk."""

    def __init__(self, journal: Path) -> None:
        """Open or make the mark of a journal. Raises StoreError."""
        self.path = mark_of(journal)
        try:
            self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}; its folder must be writable") from error

    def write(self, row: int, *, sync: bool = False) -> None:
        """Note that all rows up to this one are on the disk. Raises StoreError.

        With `sync` the note itself is too when this returns: before rows are deleted it must be.
        """
        assert self._file is not None
        try:
            os.pwrite(self._file, _line(row), 0)
            if sync:
                os.fsync(self._file)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}; free some space and resume") from error

    def close(self) -> None:
        """Close the file. Calling it twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def mark_of(journal: Path) -> Path:
    """Where the mark of a journal is."""
    return journal.with_name(f"{journal.name}-mark")


def read_mark(journal: Path) -> int:
    """The number of the last row that was committed; 0 where nobody has noted any.

    Raises StoreError when the mark is not what was written.
    """
    path = mark_of(journal)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    if not content:
        return 0  # Made, and not written to before the process ended.
    number = content.split(b" ", 1)[0]
    if not number.isdigit() or content != _line(int(number)):
        raise StoreError(f"{path} is damaged: it says {content[:40]!r}")
    return int(number)


def _line(row: int) -> bytes:
    number = b"%020d" % row
    return b"%s %08x\n" % (number, zlib.crc32(number))
