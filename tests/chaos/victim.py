"""`etude ARGUMENTS`, killed at one of its file operations, and with a log of what its journal has stored.

    victim.py FOLDER NUMBER OPERATIONS ACKNOWLEDGED ARGUMENTS

With the number 0 it is not killed. The file OPERATIONS has a byte for each operation that it came to.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import etude.store.run_folder
from tests.chaos.acknowledged import log_to
from tests.file_operations import each_operation, each_statement, killed_at

_PAGES = 20
"""Of a write-ahead log until it is copied to the database; SQLite's thousand are never in a short run."""


def main() -> None:
    """Run the command as `python -m etude` would."""
    folder, number, operations, acknowledged, *arguments = sys.argv[1:]
    log = os.open(operations, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    operation = killed_at(int(number), lambda: os.write(log, b"."))
    each_operation(folder, operation)
    each_statement(operation)
    sqlite3.connect = _with_short_logs(sqlite3.connect)
    log_to(Path(acknowledged))
    # Finding it out takes long.
    etude.store.run_folder.describe_environment = lambda **_: {}
    sys.argv = ["etude", *arguments]
    from etude.__main__ import main as command

    command()


def _with_short_logs(connect: Any) -> Any:
    def connected(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute(f"PRAGMA wal_autocheckpoint={_PAGES}")
        return connection

    return connected


if __name__ == "__main__":
    main()
