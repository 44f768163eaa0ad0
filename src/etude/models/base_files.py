"""Which files a run began from: recorded when it begins, and compared when it goes on.

A version with LoRA weights is nothing without its base, of which the run folder has no copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.models.source import cached_folder, local_path
from etude.store.journal import Journal
from etude.store.run_folder import BASE_STEPS

_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".json", ".jinja", ".model", ".txt"})
"""Of weights, configs, tokenizers and templates."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN, _DIGITS = 3, 12


async def keep_base(journal: Journal, name: str, source: str) -> None:
    """Record the files that the entry `name` of `llms` was loaded from, or see that they are the same.

    Raises RequestError as `require_base` does.
    """
    if not await asyncio.to_thread(require_base, journal, name, source):
        await journal.put(f"{BASE_STEPS}{name}", await asyncio.to_thread(_record_of, source))


def require_base(journal: Journal, name: str, source: str) -> bool:
    """Whether the files of a model are recorded.

    Raises RequestError, saying which, where they are others than those that the run began from. Files that
    were added since are none of its business.
    """
    before: dict[str, Any] | None = journal.get(f"{BASE_STEPS}{name}")
    if before is None:
        return False
    now = _record_of(source)
    if changes := _changes(before["files"], now["files"]):
        commits = before["commit"], now["commit"]
        hub = f" (its commit was {commits[0]}, and is {commits[1]})" if all(commits) else ""
        more = f" and {len(changes) - _SHOWN} others" if len(changes) > _SHOWN else ""
        raise RequestError(
            f"llms.{name}: the base model '{source}' is not what this run began from{hub}: "
            f"{'; '.join(changes[:_SHOWN])}{more}. Put those files back, or start a new run"
        )
    return True


def _record_of(source: str) -> dict[str, Any]:
    """The files of a model by the digests of their contents; for one of the hub with its commit there."""
    place = local_path(source) or cached_folder(source)
    files = [] if place is None else [place] if place.is_file() else sorted(place.iterdir())
    files = [each for each in files if each.suffix in _SUFFIXES]
    is_commit = place is not None and _COMMIT.fullmatch(place.name)
    return {
        "source": source,
        "commit": place.name if place is not None and is_commit else None,
        "files": {path.name: _digest(path) for path in files if path.is_file()},
    }


def _digest(path: Path) -> str:
    """SHA-256 of a file; in the hub's cache large files are called by it."""
    stored = path.resolve()
    if stored.parent.name == "blobs" and _SHA256.fullmatch(stored.name):
        return stored.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A clause for each file that is not as it was."""
    return [
        f"{name} is missing"
        if name not in now
        else f"{name} is changed (its SHA-256 is {now[name][:_DIGITS]}… and was {digest[:_DIGITS]}…)"
        for name, digest in before.items()
        if now.get(name) != digest
    ]
