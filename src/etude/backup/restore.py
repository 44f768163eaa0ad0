"""A run folder made from its copy on another machine."""

from __future__ import annotations

import json
import os
import shlex
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etude.backup.address import Address, address_of_run
from etude.backup.copies import ARCHIVE, FACTS, FILES, read_head, write_head, write_status
from etude.core.errors import EtudeError, RequestError, StoreError, words_of
from etude.store.files import draft_of


@dataclass(frozen=True, slots=True)
class Restored:
    """A run that came back."""

    run: Path
    address: str
    taken: float
    """Everything that was committed until then is here; Unix seconds."""
    files: int
    bytes: int

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {**asdict(self), "run": str(self.run)}

    def lines(self) -> list[str]:
        """The facts in sentences."""
        shown = f"{datetime.fromtimestamp(self.taken, UTC):%Y-%m-%d %H:%M:%S}"
        ago = max(0.0, time.time() - self.taken)
        return [
            f"restored {self.run} from {self.address}: the journal and {self.files} files, "
            f"{self.bytes / 1e6:.1f} MB",
            f"it has everything that was done until {shown} "
            f"UTC, {ago:.0f} seconds ago; what was done after that is lost, and is done again",
        ]


def fetch(text: str, root: Path, options: Mapping[str, Any]) -> Restored:
    """Make the folder of the run at an address in `root`, whose copies are this folder's from then on.

    Raises RequestError when there is no run there, or a folder of its name here, StoreError, naming the file,
    for one that is missing or torn. Nothing is left here then.
    """
    _, name = address_of_run(text)
    path = (root / name).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(
            f"{path} is there already; go on with it: etude resume {shlex.quote(str(path))}, or name another "
            "folder for runs: --output-dir"
        )
    address = Address(text.rstrip("/"), options)
    try:
        if read_head(address) is None:
            raise RequestError(f"there is no run at {address.text}")
        with draft_of(path) as draft:
            head = os.urandom(16).hex()
            # First, so that the folder before this one copies nothing more.
            write_head(address, head)
            restored = _filled(draft, path, address)
            write_status(draft, {"address": address.text, "head": head, "copied_at": restored.taken})
            return restored
    except EtudeError:
        raise
    except Exception as error:  # whatever the driver raises
        raise StoreError(f"{address.text} cannot be read: {words_of(error)}") from error


def _filled(draft: Path, path: Path, address: Address) -> Restored:
    """Place the files of a copy in a new folder."""
    draft.mkdir()
    archive = draft / ARCHIVE
    _download(address, ARCHIVE, archive)
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(draft, filter="data")
        facts = json.loads((draft / FACTS).read_text(encoding="utf-8"))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise StoreError(f"{address.text}/{ARCHIVE} is damaged: {error}; nothing was restored") from error
    size = archive.stat().st_size
    for used in (archive, draft / FACTS):
        used.unlink()
    for name, expected in facts["files"].items():
        target = draft / name
        if "/" in name:
            if ".." in target.parts or not target.is_relative_to(draft):
                raise StoreError(f"{address.text} has a file outside of the run: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(address, f"{FILES}/{name}", target)
            size += expected
        if target.stat().st_size != expected:
            raise StoreError(
                f"{address.text}/{FILES}/{name} is damaged: it has {target.stat().st_size} bytes in place of "
                f"{expected}; nothing was restored"
            )
    return Restored(path, address.text, facts["taken"], len(facts["files"]), size)


def _download(address: Address, name: str, target: Path) -> None:
    try:
        address.download(name, target)
    except FileNotFoundError as error:
        raise StoreError(f"{address.text}/{name} is missing; nothing was restored") from error
