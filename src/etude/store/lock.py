"""One process at a time in a run folder."""

from __future__ import annotations

import errno
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
        flags = os.O_RDWR | os.O_CREAT
        self._file: int | None = _open(path, flags, "the run folder must be writable")
        # Tried a few times: a listing of runs holds the lock for an instant to see if it is free.
        for _ in range(_TRIES):
            if _try_lock(self._file):
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            self.release()
            pid = _read_pid(path)
            holder = f"process {pid}" if pid else "another process"
            holder = "this process already" if pid == os.getpid() else holder
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
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(f"{path}: {error.strerror}") from error
        # Of a run that may only be read: its lock can be tried all the same.
        file = _open(path, os.O_RDONLY, "the run folder must be readable")
    try:
        return None if _try_lock(file) else _read_pid(path)
    finally:
        os.close(file)


def _open(path: Path, flags: int, need: str) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; {need}") from error


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
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
