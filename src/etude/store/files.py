"""Files that are either the old text or the new, never half of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from etude.core.errors import StoreError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file beside it, making the folders on the way.

    Raises StoreError when it cannot be written; the earlier content then stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{path}: {error.strerror}; free some space or mend the permissions, then resume the run"
        ) from error
