"""Files and folders that are there in full or not at all, or are new: nothing is overwritten by halves."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.core.errors import RequestError, StoreError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`; it is on the disk when this returns. Raises as `draft_of`."""
    with draft_of(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; it becomes `path` when the block ends well.

    The folders on the way are made. Raises StoreError when that is not possible; what was at `path` then
    stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            if draft.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            draft.replace(path)
        finally:
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror or error}; free some space, mend the permissions or "
            "choose another folder"
        ) from error


def write_new_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write texts by file name into `folder`, which is made, and return their paths.

    Raises RequestError when one of them exists already, StoreError when they cannot be written.
    """
    existing = [name for name in contents if (folder / name).exists()]
    if existing:
        raise RequestError(
            f"{folder} has {', '.join(existing)} already, and nothing is overwritten; name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}") from error
    return [folder / name for name in contents]
