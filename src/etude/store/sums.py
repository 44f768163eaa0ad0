"""The digests of a folder's files, written with them, so that a file which is not as it was is noticed.

They are in the form of `sha256sum`: `sha256sum -c SHA256SUMS` checks them too.
"""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path

from etude.core.errors import StoreError

SUMS = "SHA256SUMS"
SET_ASIDE = ".set-aside-"
"""In the names of damaged folders that nobody reads any more."""

_LINE = re.compile(r"([0-9a-f]{64})  ([\w.+ -]+)")
_SHOWN = 12
"""Digits of a digest."""
_noting = threading.Lock()
"""Held while sums are read and written anew."""


class DamagedError(StoreError):
    """A stored file is not what was written."""

    def __init__(self, folder: Path, clause: str) -> None:
        super().__init__(f"{folder} is damaged: {clause}")
        self.clause = clause
        """Which file of the folder, and what was found."""


def note_sum(path: Path, digest: str | None = None) -> None:
    """Write the digest of a file that was just written into the sums of its folder. Raises OSError.

    `digest` is its SHA-256, where whoever wrote it knows that. The folder is a draft: it and its sums get
    their name once all is there. Several threads may write to it.
    """
    digest, sums = digest or _digest(path), path.with_name(SUMS)
    with _noting:
        known = _parsed(sums.read_text(encoding="utf-8")) if sums.exists() else {}
        sums.write_text(_text({**known, path.name: digest}), encoding="utf-8")


def damage_in(folder: Path) -> list[str]:
    """A clause for each file of a folder that is not as it was written; none where all are."""
    if not folder.is_dir():
        return [f"{folder.name} is missing"]
    try:
        known = _sums_of(folder)
    except DamagedError as error:
        return [error.clause]
    there = {path.name for path in folder.iterdir()} - {SUMS}
    clauses = [_damage(folder / name, known.get(name)) for name in sorted(known.keys() | there)]
    return [clause for clause in clauses if clause is not None]


def require_as_written(path: Path) -> str:
    """The SHA-256 of a file. Raises DamagedError, saying what was found, when it is not what was written."""
    folder = path.parent
    if not folder.is_dir():
        raise DamagedError(folder, f"{folder.name} is missing")
    expected = _sums_of(folder).get(path.name, "")
    clause = _damage(path, expected or None)
    if clause is not None:
        raise DamagedError(folder, clause)
    return expected


def note_sums(folder: Path) -> None:
    """Write the digests of all files in a folder that was just written. Raises OSError."""
    for path in sorted(folder.iterdir()):
        note_sum(path)


def require_whole(folder: Path) -> None:
    """Raise DamagedError, saying what was found, when a file of a folder is not what was written."""
    if damage := damage_in(folder):
        raise DamagedError(folder, "; ".join(damage))


def _sums_of(folder: Path) -> dict[str, str]:
    """The digests by file. Raises DamagedError."""
    path = folder / SUMS
    try:
        text = path.read_text(encoding="utf-8")
        known = _parsed(text)
    except FileNotFoundError:
        raise DamagedError(folder, f"{_shown(path)} is missing") from None
    except OSError as error:
        raise DamagedError(folder, f"{_shown(path)} cannot be read ({error.strerror})") from error
    except ValueError:
        known = {}
    if not known or _text(known) != text:
        raise DamagedError(folder, f"{_shown(path)} is not what was written")
    return known


def _damage(path: Path, expected: str | None) -> str | None:
    try:
        digest, size = _digest(path), path.stat().st_size
    except FileNotFoundError:
        return f"{_shown(path)} is missing"
    except OSError as error:
        return f"{_shown(path)} cannot be read ({error.strerror})"
    if expected is None:
        return f"{_shown(path)} is not in {SUMS}"
    if digest == expected:
        return None
    if not size:
        return f"{_shown(path)} is empty"
    return (
        f"{_shown(path)} is not what was written (its SHA-256 is {digest[:_SHOWN]}… and was "
        f"{expected[:_SHOWN]}…)"
    )


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parsed(text: str) -> dict[str, str]:
    """Raises ValueError for what no sums are."""
    matches = [_LINE.fullmatch(line) for line in text.splitlines()]
    if None in matches:
        raise ValueError("no line of digests")
    return {match[2]: match[1] for match in matches if match is not None}


def _text(known: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(known.items()))
