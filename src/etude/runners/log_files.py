"""Logs of bounded length: what runners print may be without end, and the disk of the head is not."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from etude.store.files import open_private

MOST_BYTES = 8_000_000
"""Of a log; and of the part before it, which is kept beside it."""
BEFORE = ".before"
"""Ends the name of the file with that part."""


def bound(path: Path, most: int = MOST_BYTES) -> None:
    """Where a log has grown longer than `most` bytes, begin it anew, with a line that says so.

    The file `NAME.before` has the old log then, in place of an older one. Whoever appends to the log may have
    it open, and go on; what is printed in the instant between copy and cut is lost. A log that is not there,
    or cannot be written, stays as it is.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= most:
            return
        before = path.with_name(path.name + BEFORE)
        with path.open("rb") as old, open_private(before, "wb") as copy:
            shutil.copyfileobj(old, copy)
        with path.open("ab") as log:
            log.truncate(0)
            log.write(f"[etude: the log had more than {most} bytes; {before.name} has them]\n".encode())
