"""The files of a run folder that belong to a backup, held still while they are read."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.backup.address import Content
from etude.store.database import DATABASE
from etude.store.facts import STORAGE
from etude.store.files import FOLDER_MODE
from etude.store.run_folder import LOCK
from etude.store.status import STATUS
from etude.store.sums import SET_ASIDE

STAGE = ".storage"
"""Where files are held while they are written to the storage."""

_LEFT_OUT = {DATABASE, *(f"{DATABASE}-{part}" for part in ("wal", "shm", "mark")), LOCK, STORAGE, STATUS}


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells a file from the one that takes its place, and from itself when it has grown."""

    inode: int
    size: int
    changed: int
    """Nanoseconds."""


def listing(folder: Path) -> dict[str, Identity]:
    """The files of a run but for its database, logs and drafts, by their paths in its folder."""
    files = {}
    for root, folders, names in os.walk(folder, followlinks=True):
        inside = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not _is_left_out(name)]
        for name in names:
            is_left_out = name in _LEFT_OUT and inside == Path()
            if is_left_out or name.endswith((".part", ".log", ".log.before", ".sock")):
                continue
            try:
                facts = (Path(root) / name).stat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(facts.st_mode):
                files[(inside / name).as_posix()] = Identity(facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return files


def _is_left_out(folder: str) -> bool:
    return folder in (STAGE, "logs") or folder.endswith(".part") or SET_ASIDE in folder


@dataclass(slots=True)
class Stage:
    """A folder in which the files of one backup stay as they are, and what is known of their contents."""

    run: Path
    contents: dict[str, tuple[Identity, Content]] = field(default_factory=dict)
    """Digests by path, which stay right as long as the file does."""

    @property
    def folder(self) -> Path:
        """The folder, beside the files that it holds."""
        return self.run / STAGE

    def clear(self) -> None:
        """Let go of all files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def hold(self, files: Mapping[str, Identity], stored: Container[str]) -> dict[str, Path]:
        """Hold the files whose contents, by SHA-256, are not stored; where to read them.

        Raises FileNotFoundError.

        A file that is deleted or replaced meanwhile stays here as it is: it has a second name, or where the
        disk cannot do that, a copy.
        """
        self.clear()
        self.folder.mkdir(FOLDER_MODE)
        held = {}
        for number, (path, identity) in enumerate(files.items()):
            known = self.contents.get(path)
            if known is None or known[0] != identity or known[1].sha256 not in stored:
                held[path] = self.folder / str(number)
                _link(self.run / path, held[path])
        return held

    def digest(self, path: str, identity: Identity, held: Path | None) -> Content:
        """The content of a file as it was listed. Raises OSError when it is shorter by now."""
        known = self.contents.get(path)
        if held is not None and (known is None or known[0] != identity):
            content = Content.of_file(held, identity.size)
            if content.size != identity.size:
                raise OSError(f"{self.run / path} was cut off while it was read")
            self.contents[path] = identity, content
        return self.contents[path][1]


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, name)
