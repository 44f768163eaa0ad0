"""Reading JSON Lines files, with the line of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.core.errors import DatasetError


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON Lines file, each with where it stands: `file:line`.

    Raises DatasetError for a line that is no JSON; UnicodeDecodeError and OSError as reading does.
    """
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                if line.strip():
                    yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{where}:{error.colno}: broken JSON: {error.msg}") from error
