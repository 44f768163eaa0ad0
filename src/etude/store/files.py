"""Safe writing of files and folders: each appears in full or not at all, and digests reveal later damage.

Only the user may read the files that a run or a server writes, whatever the umask. A folder may have the
digests of its files, so that a changed file is noticed.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from etude.core.errors import RequestError, StoreError
from etude.core.json_text import json_facts
from etude.core.secrets import mask_secrets

WEIGHTS_FILE = "trained.safetensors"
"""The file of the tensors that training changes, by parameter name. Versions are restored from it."""
SERVER_DATABASE = "server.db"
"""The database of a language-model server, in its data folder."""
TO_EXPORT = "export a run's model with `etude export RUN`, and take a server's from its route /export/MODEL"
"""The advice for folders that have only the trained tensors."""

FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""Only the user has access."""

_DRAFT = re.compile(r"\..+\.(\d+)\.part(-wal|-shm|-journal)?")
"""The name of a draft, with the process that writes it. A database draft has more files."""


def write_atomically(path: Path, text: str, *, exact: bool = False) -> None:
    """Write `text` to `path`; it is on the disk when this returns. Raises as `open_draft`.

    Secrets are masked. Use `exact` for the words of models and for messages to them. A lone surrogate, which
    UTF-8 lacks, is written as `\\ud800`, as in JSON.
    """
    with open_draft(path) as draft, open_private(draft, "w") as file:
        file.write(text if exact else mask_secrets(text))


def private_folder(path: Path) -> Path:
    """Make a folder and its missing parents, for this user alone, synced to the disk. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
        _sync(folder.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)  # Raises if a file has this name.
    return path


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing, as text in UTF-8 or as bytes. A new file is for this user alone."""
    encoding, errors = (None, None) if "b" in mode else ("utf-8", "backslashreplace")
    return open(
        path,
        mode,
        encoding=encoding,
        errors=errors,
        opener=lambda name, flags: os.open(name, flags, FILE_MODE),
    )


def append_json_line(path: Path, facts: Mapping[str, Any]) -> None:
    """Append facts as a line of JSON, with secrets masked. Raises StoreError."""
    line = mask_secrets(json.dumps(json_facts(facts), ensure_ascii=False))
    try:
        private_folder(path.parent)
        with open_private(path, "a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            is_cut = file.read(1) not in (b"", b"\n")
            file.write((b"\n" if is_cut else b"") + line.encode(errors="backslashreplace") + b"\n")
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def open_draft(path: Path, *, sync: bool = True, private: bool = True) -> Iterator[Path]:
    """Yield a path next to `path` for a file or folder. It becomes `path` when the block succeeds.

    With `sync` it is on the disk then. Missing folders are made. Without `private`, the umask says who may
    read it. Raises StoreError when this is not possible; the old `path` then stays.
    """
    draft = _draft(path)
    try:
        private_folder(path.parent) if private else path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            _put_in_place(draft, path, sync=sync, private=private)
        finally:
            _delete(draft)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written: {error.strerror or error}; free some space, fix the permissions or "
        "choose another folder"
    )


def _draft(path: Path) -> Path:
    # The name has the thread, because another thread may be writing the same file.
    return path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}.part")


def delete_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that it is never there in part. Raises OSError."""
    path.rename(draft := _draft(path))
    _delete(draft)


def _put_in_place(draft: Path, path: Path, *, sync: bool, private: bool) -> None:
    """Rename a complete file or folder. All of it is on the disk before: a power cut could empty it."""
    for each in (draft, *draft.rglob("*")) if private else ():
        if not each.is_symlink():
            each.chmod(FOLDER_MODE if each.is_dir() else FILE_MODE)
    is_folder = draft.is_dir()
    if sync and not is_folder:
        _sync(draft)
    for root, _, names in os.walk(draft, topdown=False) if sync else ():
        for name in (*names, ""):
            _sync(Path(root, name))
    if is_folder:
        shutil.rmtree(path, ignore_errors=True)
    draft.replace(path)
    if sync:
        _sync(path.parent)
        if is_folder:
            _sync(path.parent.parent)  # The parent folder may be new too.


def delete_left_over(folder: Path) -> None:
    """Delete the drafts in a folder and its subfolders whose processes are gone.

    Drafts with this process's id count too: in a container, a process may get the id of an earlier one.
    """
    for path in [*folder.rglob(".*.part*")]:
        if (match := _DRAFT.fullmatch(path.name)) is None:
            continue
        try:
            os.kill(int(match[1]), 0)
            is_gone = int(match[1]) == os.getpid()
        except (OSError, OverflowError) as error:
            is_gone = not isinstance(error, PermissionError)
        if is_gone:
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if not path.is_file() and not path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_new_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write new texts by name into `folder`. Raises RequestError if a file exists, or StoreError."""
    existing = [name for name in contents if (folder / name).exists()]
    if existing:
        raise RequestError(
            f"{folder} already has {', '.join(existing)}, which is never overwritten; name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}") from error
    return [folder / name for name in contents]


SUMS = "SHA256SUMS"
"""The file with the digests of a folder's other files. `sha256sum -c SHA256SUMS` can check them."""
SET_ASIDE = ".set-aside-"
"""Part of the names of damaged folders, which are never read again."""

_LINE = re.compile(r"^([0-9a-f]{64})  ([\w.+ -]+)$", re.MULTILINE)
_noting = threading.Lock()
"""Held while digests are read and written again."""


class DamagedError(StoreError):
    """A stored file is damaged."""

    def __init__(self, folder: Path, clause: str) -> None:
        super().__init__(f"{folder} is damaged: {clause}")
        self.clause = clause
        """The damaged file, and how it is damaged."""


def note_sum(path: Path) -> None:
    """Add a new file's SHA-256 to the sums of its folder, which threads may share. Raises OSError."""
    digest, sums = file_digest(path), path.with_name(SUMS)
    with _noting:
        known = _parse_digests(sums.read_text(encoding="utf-8")) if sums.exists() else {}
        sums.write_text(_format_digests({**known, path.name: digest}), encoding="utf-8")


def damage_in(folder: Path, *, only: str | None = None, without: str = SUMS) -> list[str]:
    """Return a clause for each damaged file of a folder, for `only` one, or for all but the one `without`."""
    try:
        known = _read_digests(folder)
    except DamagedError as error:
        return [error.clause]
    names = {path.name for path in folder.iterdir()} | known.keys() if only is None else {only}
    clauses = [_damage(folder / name, known.get(name)) for name in sorted(names - {SUMS, without})]
    return [clause for clause in clauses if clause is not None]


def require_as_written(path: Path) -> None:
    """Raise DamagedError, saying how, if a file is damaged."""
    if damage := damage_in(path.parent, only=path.name):
        raise DamagedError(path.parent, damage[0])


def note_sums(folder: Path) -> None:
    """Write the digests of all files in a folder that was just written. Raises OSError."""
    for path in sorted(folder.iterdir()):
        note_sum(path)


def _read_digests(folder: Path) -> dict[str, str]:
    """Return the digests by file name. Raises DamagedError."""
    path = folder / SUMS
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        missing = _short_path(path) if folder.is_dir() else folder.name
        raise DamagedError(folder, f"{missing} is missing") from None
    except OSError as error:
        raise DamagedError(folder, f"{_short_path(path)} cannot be read ({error.strerror})") from error
    known = _parse_digests(text)
    if not known or _format_digests(known) != text:
        raise DamagedError(folder, f"{_short_path(path)} is not what was written")
    return known


def _damage(path: Path, expected: str | None) -> str | None:
    try:
        digest, size = file_digest(path), path.stat().st_size
    except FileNotFoundError:
        return f"{_short_path(path)} is missing"
    except OSError as error:
        return f"{_short_path(path)} cannot be read ({error.strerror})"
    if expected is None:
        return f"{_short_path(path)} is not in {SUMS}"
    if digest == expected:
        return None
    return f"{_short_path(path)} is not what was written" if size else f"{_short_path(path)} is empty"


def _short_path(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse_digests(text: str) -> dict[str, str]:
    """Parse a file of digests. Other lines are left out."""
    return {name: digest for digest, name in _LINE.findall(text)}


def _format_digests(known: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(known.items()))
