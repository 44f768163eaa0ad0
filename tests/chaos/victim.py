"""`etude ARGUMENTS`, killed at one of its file operations, and with a log of what its journal has stored.

    victim.py FOLDER NUMBER OPERATIONS ACKNOWLEDGED ARGUMENTS

With the number 0 it is not killed. The file OPERATIONS has a byte for each operation that it came to.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from tests.chaos.acknowledged import log_to
from tests.file_operations import each_operation, each_statement, killed_at

FOLDER, MODULES = "CHAOS_FOLDER", "CHAOS_MODULES"
"""Variables with the folder of the project, and the file for the names of modules that a run imports."""

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
    if MODULES in os.environ:
        modules = Path(os.environ[MODULES])
        atexit.register(lambda: modules.write_text(" ".join(sorted(sys.modules))))
    _leave_out_what_takes_long()
    sys.argv = ["etude", *arguments]
    from etude.__main__ import main as etude

    etude()


def _leave_out_what_takes_long() -> None:
    """Files of pictures and of what the run is on are written without being drawn or found out."""
    import etude.report.files
    import etude.store.run_folder

    etude.report.files.render_reward_plot = lambda *_, **__: b""
    etude.store.run_folder.describe_environment = lambda **_: {}


def _with_short_logs(connect: Any) -> Any:
    def connected(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute(f"PRAGMA wal_autocheckpoint={_PAGES}")
        return connection

    return connected


if __name__ == "__main__":
    main()
