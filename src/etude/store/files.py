"""Files and folders that are there in full or not at all, or are new: nothing is overwritten by halves."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.core.errors import RequestError, StoreError


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


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; it becomes `path` when the block ends well.

    Raises StoreError when that is not possible; what was at `path` then stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        if draft.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        draft.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise StoreError(
            f"{path} cannot be written: {why}; free some space or choose another folder"
        ) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


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
