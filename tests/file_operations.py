"""A process that is killed at one of its operations on files; and a command that is.

`python -m tests.file_operations FOLDER NUMBER ARGUMENTS` is `etude ARGUMENTS`, which gets kill -9 before its
NUMBER-th operation on the folder; with 0 it is not killed.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import ROOT, Forked

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR
_READS = ("SELECT", "PRAGMA", "--")


def each_operation(prefix: str, operation: Callable[[], None]) -> None:
    """From now on call `operation` before this process changes a file whose path begins with `prefix`.

    That is before it opens one to write, and renames, deletes, truncates, links, makes or syncs one.
    """
    sync = os.fsync

    def sync_and_count(file: int) -> None:
        # Files that native code writes are seen here alone.
        if _absolute(Path(f"/proc/self/fd/{file}").readlink()).startswith(prefix):
            operation()
        sync(file)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            if isinstance(flags, int) and flags & _WRITES and _absolute(path).startswith(prefix):
                operation()
        elif event in _CHANGES:
            # Whole folders are deleted by the names in them.
            within = values[1] if event in ("os.remove", "os.rmdir") else -1
            if _absolute(values[0], within).startswith(prefix):
                operation()

    os.fsync = sync_and_count
    sys.addaudithook(hook)


def each_statement(operation: Callable[[], None]) -> None:
    """From now on call `operation` before a statement by which this process changes a database."""
    connect = sqlite3.connect

    def statement(text: str) -> None:
        if not text.lstrip().upper().startswith(_READS):
            operation()

    def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(statement)
        return connection

    sqlite3.connect = connect_traced  # type: ignore[assignment]


def killed_at(number: int, counted: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """An operation that ends this process by SIGKILL at its `number`-th call; others are `counted`."""
    reached = 0

    def operation() -> None:
        nonlocal reached
        reached += 1
        if reached == number:
            os.kill(os.getpid(), signal.SIGKILL)
        counted()

    return operation


def _absolute(path: Any, within: int = -1) -> str:
    if not isinstance(path, str | bytes | os.PathLike):
        return ""  # A descriptor, of a file whose opening was an operation.
    folder = Path(f"/proc/self/fd/{within}").readlink() if within >= 0 else Path.cwd()
    return str(Path(folder, os.fsdecode(path)))


def die_at(folder: Path, number: int) -> None:
    """Have this process get kill -9 before its `number`-th operation on a folder, or statement to a database.

    The file `FOLDER.operations` gets a byte for each.
    """
    log = os.open(operations_log(folder), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    operation = killed_at(number, lambda: os.write(log, b"."))
    each_operation(f"{folder}{os.sep}", operation)
    each_statement(operation)


def operations_log(folder: Path) -> Path:
    """The file that has a byte for each operation of the last process that `die_at` was called in."""
    return folder.with_name(f"{folder.name}.operations")


def is_killed(*words: Any, folder: Path, module: str = "tests.file_operations") -> bool:
    """Whether such a process, run in a folder, was killed before it was over."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = Forked(["-m", module, *map(str, words)], folder, environment, program="python")
    _, errors = process.communicate(timeout=100)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode == -signal.SIGKILL


def main(folder: str, number: str, *arguments: str) -> None:
    """Run the command."""
    from etude.cli.app import app

    die_at(Path(folder), int(number))
    app(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
