"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from etude.core.errors import RequestError, StoreError

_TRIES = 5
_PAUSE_SECONDS = 0.02


class RunLock:
    """Holds a run folder for this process; the operating system frees it when that ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock at `path`. Raises StoreError when another process has it."""
        self._file: int | None = _open(path)
        if not _lock(self._file):
            holder = _holder_text(path)
            os.close(self._file)
            self._file = None
            raise StoreError(
                f"run {path.parent.name} is in use by {holder}; "
                f"wait for it to end, or stop it, then type the command again"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give the lock up. Calling it twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def locked_by(path: Path) -> int | None:
    """The process that holds the lock at `path`, or None when nobody does."""
    if not path.is_file():
        return None
    file = _open(path)
    try:
        return None if _try_lock(file) else _read_pid(path)
    finally:
        os.close(file)


def _holder_text(path: Path) -> str:
    pid = _read_pid(path)
    if pid == os.getpid():
        return "this process already"
    return f"process {pid}" if pid else "another process"


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; the run folder must be writable") from error


def _lock(file: int) -> bool:
    """Take the lock. Tried a few times: a listing of runs holds it for an instant to see if it is free."""
    for _ in range(_TRIES):
        if _try_lock(file):
            return True
        time.sleep(_PAUSE_SECONDS)
    return False


def _try_lock(file: int) -> bool:
    try:
        import fcntl
    except ImportError as error:
        raise RequestError("run folders need Linux, macOS or WSL: this system has no file locks") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_pid(path: Path) -> int:
    """The process id in a lock file; 0 when there is none yet."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
