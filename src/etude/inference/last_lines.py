"""The end of a log."""

from __future__ import annotations

import os
from pathlib import Path

_BYTES = 4096


def last_lines(path: Path, count: int = 12) -> str:
    """The last lines of a file of any size; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])
