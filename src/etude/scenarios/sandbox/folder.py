"""The folder that a sandboxed program may write to."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etude.scenarios.sandbox.limits import Limits


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """An empty folder, that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="etude-sandbox-"))
    try:
        yield folder
    finally:
        remove_tree(folder)


def fits(folder: Path, limits: Limits) -> bool:
    """Whether what is in the folder is within the limits. Looks at no more than that takes."""
    entries = size = 0
    pending = [folder]
    while pending:
        for entry in _list(pending.pop()):
            entries += 1
            with contextlib.suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
            if entries > limits.folder_entries or size > limits.folder_bytes:
                return False
    return True


def remove_tree(folder: Path) -> None:
    """Remove a folder, however deep and however unwilling what is in it."""
    pending, number = [folder], 0
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            current.chmod(stat.S_IRWXU)
        for entry in _list(current):
            try:
                Path(entry.path).unlink()
            except OSError:
                # A folder. It is moved up, because one that lies deep has no path short enough.
                number += 1
                moved = folder / f"{secrets.token_hex(8)}-{number}"
                with contextlib.suppress(OSError):
                    Path(entry.path).rename(moved)
                    pending.append(moved)
        if current != folder:
            with contextlib.suppress(OSError):
                current.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # Gone already, or not to be looked into.
