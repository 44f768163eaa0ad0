"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.core.errors import StoreError


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A place beside `path` to write a file or folder to; it becomes `path` when the block ends well.

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
            f"{path} cannot be written: {why}; free some space or choose another place"
        ) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
