"""`etude ARGUMENTS`, killed at one of the file operations of its run.

    chaos_victim.py FOLDER NUMBER COUNTS ARGUMENTS

With the number 0 it is not killed. The file COUNTS has a byte for each operation that it came to.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

_PATHS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_connect = sqlite3.connect
_READS = ("SELECT", "PRAGMA", "--")


class Victim:
    """Counts what its process does to the files in a folder, and is killed before the last of it."""

    def __init__(self, folder: str, number: int, counts: str) -> None:
        self._folder, self._number, self._reached = folder, number, 0
        self._counts = os.open(counts, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)

    def watch(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's audit hook."""
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if writes and self._is_inside(path):
                self._operation()
        elif event in _PATHS and self._is_inside(args[0]):
            self._operation()

    def connect(self, *args: Any, **options: Any) -> sqlite3.Connection:
        """A connection as `sqlite3.connect` makes it, whose statements count."""
        connection = _connect(*args, **options)
        connection.set_trace_callback(self._statement)
        return connection

    def _statement(self, text: str) -> None:
        if not text.lstrip().upper().startswith(_READS):
            self._operation()

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(Path(path).absolute()).startswith(self._folder)

    def _operation(self) -> None:
        self._reached += 1
        if self._reached == self._number:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(self._counts, b".")


def main() -> None:
    """Run the command as `python -m etude` would."""
    folder, number, counts, *arguments = sys.argv[1:]
    victim = Victim(folder, int(number), counts)
    sys.addaudithook(victim.watch)
    sqlite3.connect = victim.connect
    sys.argv = ["etude", *arguments]
    from etude.__main__ import main as etude

    etude()


if __name__ == "__main__":
    main()
