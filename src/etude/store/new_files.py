"""Files of a new project, written where nothing is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from etude.core.errors import RequestError, StoreError


def write_new_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write texts by file name into `folder`, which is made; what was written.

    Raises RequestError when one of them is there already, StoreError when they cannot be written.
    """
    there = [name for name in contents if (folder / name).exists()]
    if there:
        raise RequestError(
            f"{folder} has {', '.join(there)} already, and nothing is overwritten; name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}") from error
    return [folder / name for name in contents]
