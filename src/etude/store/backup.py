"""Copies of a run at an fsspec address, made during the run and at its end, and runs restored from them.

SQLite's backup API copies the journal. If a file changes meanwhile, the copy starts again, so that its
journal and files belong together.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sqlite3
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from etude.config.schema import StorageConfig
from etude.core.errors import EtudeError, MissingExtraError, RequestError, StoreError, error_words
from etude.core.interfaces import Progress
from etude.core.threads import call_in_thread
from etude.store.database import DATABASE, open_database, store_error
from etude.store.facts import STORAGE
from etude.store.files import (
    FOLDER_MODE,
    SET_ASIDE,
    open_draft,
    open_private,
    private_folder,
    write_atomically,
)
from etude.store.run_folder import LOCK, RunFolder
from etude.store.status import STATUS

ARCHIVE, HEAD, FILES = "run.tar.gz", "head.json", "files"
_WRITTEN_ONCE = re.compile(r"(checkpoints|bases|export)/|learners/(.+/)?step-")
"""Matches the paths of files that are copied one by one. All others change, and go with the journal."""
FACTS = ".copy.json"
"""The file in the archive that has the time of the copy, and the files that belong to it with their sizes."""

_STAGE = ".storage"
_TRIES, _PAUSE_SECONDS = 20, 0.05
_DATABASES = tuple(f"{DATABASE}{part}" for part in ("", "-wal", "-shm"))
_LEFT_OUT = {*_DATABASES, LOCK, STORAGE, STATUS}

T = TypeVar("T")
Identity: TypeAlias = tuple[int, int, int]
"""Inode, size and time of the last change. They tell a file from its replacement."""


PATIENCE = 60.0
"""Seconds that a run waits for its storage, at its beginning and its end."""
_SECONDS_AFTER_FAILURE = 10.0
_LONGEST_SECONDS = 3600.0
"""The time limit of a copy during the run. The next copy keeps the files that are uploaded already."""
_PIECE = 8 << 20
"""Bytes copied at a time."""


def split_run_address(text: str) -> tuple[str, str]:
    """Split `s3://bucket/etude/NAME` into the parent address and the name. Raises RequestError."""
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/") or parent.endswith(":"):
        raise RequestError(f"{text} names no run: write ADDRESS/RUN, as in s3://bucket/etude/my-run")
    return parent, name


class Address:
    """A folder at an address. Its methods raise the errors of fsspec's driver, most of them OSError."""

    def __init__(self, text: str, options: Mapping[str, Any]) -> None:
        """Raise MissingExtraError without fsspec, RequestError if the driver is missing or refuses."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtraError(f"storage: {text}", "storage") from error
        self.text = text
        try:
            self._system, self._path = url_to_fs(text, **options)
        except ImportError as error:
            raise RequestError(f"storage {text}: fsspec has no driver for it here: {error}") from error
        except (TypeError, ValueError) as error:
            raise RequestError(f"storage {text}: {error}; check its address and 'storage.options'") from error
        self._is_local = text.startswith(("file:", "local:"))

    def read(self, name: str) -> bytes:
        """Return the bytes of an object. Raises FileNotFoundError."""
        data: bytes = self._system.cat_file(f"{self._path}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, replacing the old one."""
        with self._open_for_writing(f"{self._path}/{name}") as target:
            target.write(data)

    def upload(self, source: Path, name: str) -> None:
        """Upload a file as an object. The old object stays until the upload is complete."""
        path = f"{self._path}/{name}"
        with source.open("rb") as file, self._open_for_writing(f"{path}.part") as target:
            shutil.copyfileobj(file, target, _PIECE)
        self._system.mv(f"{path}.part", path)

    def download(self, name: str, target: Path) -> None:
        """Download an object to a file. Raises StoreError if it is missing."""
        try:
            self._system.get_file(f"{self._path}/{name}", str(target))
        except FileNotFoundError as error:
            raise StoreError(f"{self.text}/{name} is missing; nothing was restored") from error

    def delete(self, name: str) -> None:
        """Delete an object. Raises FileNotFoundError."""
        self._system.rm(f"{self._path}/{name}")

    def _open_for_writing(self, path: str) -> IO[bytes]:
        """Open an object for writing. On this machine, only the user may read it."""
        if self._is_local:
            private_folder(Path(path).parent)
            return open_private(Path(path), "wb")
        opened: IO[bytes] = self._system.open(path, "wb")
        return opened


async def call_storage(config: StorageConfig, call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a call in a thread, which is abandoned after some seconds (`PATIENCE`). Raises RequestError."""
    seconds = PATIENCE if seconds is None else seconds
    try:
        async with asyncio.timeout(seconds):
            return await call_in_thread(call)
    except TimeoutError as error:
        raise RequestError(
            f"storage {config.address} did not answer within {seconds:g} s; is its "
            "address right, and reachable from here?"
        ) from error
    except EtudeError:
        raise
    except Exception as error:
        raise RequestError(
            f"storage {config.address}: {error_words(error)}; is there such a bucket or folder, and may "
            "these credentials read, write and delete there? They come from the environment or "
            "`storage.options`"
        ) from error


async def probe(config: StorageConfig) -> str:
    """Write, read and delete an object at the address; return a sentence. Raises RequestError."""
    name, data = f"etude-check-{secrets.token_hex(8)}", secrets.token_bytes(64)
    address = Address(config.address, config.options)
    await call_storage(config, lambda: address.write(name, data))
    read = await call_storage(config, lambda: address.read(name))
    await call_storage(config, lambda: address.delete(name))
    if read != data:
        raise RequestError(f"storage {config.address}: what is read is not what was written")
    return f"{config.address} takes backups: an object was written, read back and deleted"


class TakenOver(StoreError):
    """Another folder has taken over the run."""


class Backup:
    """Makes the copies of one run."""

    def __init__(self, config: StorageConfig, run: RunFolder, progress: Progress) -> None:
        self.address = Address(f"{config.address}/{run.path.name}", config.options)
        self._config, self._run, self._progress = config, run, progress
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            known = dict(json.loads((run.path / STORAGE).read_text(encoding="utf-8")))
        self.is_new = known.get("address") != self.address.text
        """Whether this folder was never copied to the address."""
        self._head = str(known["head"]) if not self.is_new else os.urandom(16).hex()
        self._there: dict[str, Identity] = {}
        """The identity that each uploaded file had here when it was uploaded."""
        self._copied: object = None
        """The state of the folder at its last copy."""
        self._turn = threading.Lock()
        """Held by a copy. One that was given up goes on in its thread."""
        self._copied_at: float | None = None
        self._error: Exception | None = None
        self._over = asyncio.Event()

    async def begin(self) -> None:
        """Raise RequestError or TakenOver if the run must not begin."""
        try:
            await call_storage(self._config, self.require_own)
            if self.is_new:
                await probe(self._config)
        except RequestError as error:
            if self.is_new:
                raise RequestError(f"{error}. Fix this, or run without backups: -o storage=null") from error
            self._tell(error)

    async def keep(self) -> None:
        """Copy changes again and again, until the run ends or another folder takes it over."""
        while not isinstance(self._error, TakenOver):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.interval):
                    await self._over.wait()
                    return
            await self._copy_within(_LONGEST_SECONDS)

    async def end(self, task: asyncio.Task[None], seconds: float) -> None:
        """Make the last copy of a run that has begun, within `seconds`, and report a failure."""
        self._over.set()
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        if not self._run.is_blank and not isinstance(self._error, TakenOver):
            with contextlib.suppress(StoreError):  # The writer reports its errors itself.
                await self._run.journal.flush()
            await self._copy_within(seconds)

    async def _copy_within(self, seconds: float) -> None:
        started = time.time()
        try:
            await call_storage(self._config, self.copy, seconds)
        except (RequestError, StoreError) as error:
            self._tell(error)
        else:
            self._copied_at = started
            self._tell(None)
        last_error = None if self._error is None else str(self._error)
        with contextlib.suppress(StoreError):  # Other parts report a folder that cannot be written.
            self._note(copied_at=self._copied_at, last_error=last_error)

    def _tell(self, error: Exception | None) -> None:
        before, self._error = self._error, error
        where = f"storage {self.address.text}"
        if error is not None and before is None:
            text = f"{where}: the run is not backed up: {error}. It goes on, and its folder has everything"
            self._progress.message(text, warning=True)
        elif error is None and before is not None:
            self._progress.message(f"{where} takes backups again", warning=False)

    def require_own(self) -> None:
        """Raise RequestError if the address has another run of this name, TakenOver if another folder owns
        this run's copies now."""
        head = _read_head(self.address)
        if head is None:
            self._there, self._copied = {}, None  # Somebody may have deleted the copies.
            return
        if head["id"] == self._head:
            return
        if self.is_new:
            raise RequestError(
                f"{self.address.text} already has a run of this name; continue it: etude resume "
                f"{self.address.text}, or choose another name"
            )
        raise TakenOver(f"another folder has continued this run: process {head['process']} on {head['host']}")

    def copy(self) -> None:
        """Copy everything that is new. Raises an error if that fails; the previous copy then stays valid."""
        with self._turn:
            self.require_own()
            for _ in range(_TRIES):
                files = list_run_files(self._run.path)
                state = files, [_identity(self._run.path / name) for name in _DATABASES[:2]]
                if state == self._copied:
                    return
                try:
                    if self._copy(files):
                        self._copied = state
                        return
                except FileNotFoundError:
                    if list_run_files(self._run.path) == files:
                        raise  # It is the storage's: no file was deleted here meanwhile.
                time.sleep(_PAUSE_SECONDS)
            raise StoreError(f"the files in {self._run.path} change too fast to be copied")

    def _copy(self, files: dict[str, Identity]) -> bool:
        """Copy the run. Return whether its files stayed the same until the journal was copied."""
        if self._copied is None:
            self._note()  # After a kill behind the next line, the folder must know its own head.
            self.is_new = False
            _write_head(self.address, self._head)
        for path, identity in files.items():
            if _WRITTEN_ONCE.match(path) and self._there.get(path) != identity:
                self.address.upload(self._run.path / path, f"{FILES}/{path}")
                self._there[path] = identity
        stage = self._run.path / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(FOLDER_MODE)
        try:
            # One archive: the journal as of one commit, and the other files that change.
            database, facts, archive = stage / DATABASE, stage / FACTS, stage / ARCHIVE
            sizes = {name: size for name, (_, size, _) in files.items()}
            facts.write_text(json.dumps({"taken": time.time(), "files": sizes}), encoding="utf-8")
            copy_journal(self._run.path, database)
            members = {DATABASE: database, FACTS: facts}
            members |= {name: self._run.path / name for name in files if not _WRITTEN_ONCE.match(name)}
            # Of a link its target is copied: a restored run must need no other place.
            with tarfile.open(archive, "w:gz", compresslevel=1, dereference=True) as packed:
                for name, each in members.items():
                    packed.add(each, name)
            if list_run_files(self._run.path) != files:
                return False
            self.address.upload(archive, ARCHIVE)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        for path in self._there.keys() - files.keys():
            with contextlib.suppress(FileNotFoundError):
                self.address.delete(f"{FILES}/{path}")
            del self._there[path]
        return True

    def _note(self, **facts: Any) -> None:
        """Write the state of the backup into the run folder. Raises StoreError."""
        _write_status(self._run.path, address=self.address.text, head=self._head, **facts)


def copy_journal(run: Path, target: Path) -> None:
    """Copy a run's journal as of one commit, even while it is written. Raises StoreError."""
    try:
        with (
            closing(open_database(run / DATABASE, read_only=True)) as journal,
            closing(sqlite3.connect(target)) as copy,
        ):
            journal.backup(copy)
    except sqlite3.Error as error:
        raise store_error(run / DATABASE, error) from error


def list_run_files(folder: Path) -> dict[str, Identity]:
    """Return the files of a run by path, without its database, logs and drafts."""
    files = {}
    for root, folders, names in os.walk(folder, followlinks=True):
        inside = Path(root).relative_to(folder)
        drafts = {name for name in folders if name.endswith(".part") or SET_ASIDE in name}
        folders[:] = [name for name in folders if name not in drafts | {_STAGE}]
        for name in names:
            is_left_out = name in _LEFT_OUT and inside == Path()
            path = Path(root) / name
            if is_left_out or name.endswith((".part", ".log")) or not path.is_file():
                continue
            if (identity := _identity(path)) is not None:
                files[(inside / name).as_posix()] = identity
    return files


def _identity(path: Path) -> Identity | None:
    with contextlib.suppress(FileNotFoundError):
        facts = path.stat()
        return facts.st_ino, facts.st_size, facts.st_mtime_ns
    return None


def _read_head(address: Address) -> dict[str, Any] | None:
    """Return the head of the copies at an address, or None without copies."""
    try:
        return dict(json.loads(address.read(HEAD)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{address.text}/{HEAD} is damaged: {error}; delete it") from error


def _write_head(address: Address, head: str) -> None:
    """Make the folder with this head the owner of the copies at an address."""
    facts = {"id": head, "host": socket.gethostname(), "process": os.getpid()}
    address.write(HEAD, json.dumps(facts).encode())


def _write_status(run: Path, **facts: Any) -> None:
    write_atomically(run / STORAGE, json.dumps(facts, indent=2) + "\n")


@asynccontextmanager
async def back_up(config: StorageConfig | None, run: RunFolder, progress: Progress) -> AsyncIterator[None]:
    """Copy the run every `interval` seconds, and at its end. Raises RequestError, TakenOver."""
    if config is None:
        yield
        return
    backup = Backup(config, run, progress)
    await backup.begin()
    task = asyncio.create_task(backup.keep(), name="copy the run to its storage")
    try:
        yield
    except BaseException:
        await backup.end(task, min(PATIENCE, _SECONDS_AFTER_FAILURE))
        raise
    await backup.end(task, PATIENCE)


@dataclass(frozen=True, slots=True)
class Restored:
    """A run that was restored from its copies."""

    run: Path
    address: str
    taken: float
    """When the copy was taken, in Unix seconds. The folder has everything that was committed until then."""

    def __str__(self) -> str:
        return (
            f"restored {self.run} from {self.address}, with everything that was done until "
            f"{datetime.fromtimestamp(self.taken, UTC):%Y-%m-%d %H:%M:%S} UTC; "
            "what was done after that is lost, and is done again"
        )


def restore_run(text: str, root: Path, options: Mapping[str, Any]) -> Restored:
    """Restore the run at an address to a new folder in `root`. That folder owns the copies from now on.

    Raises RequestError if there is no run at the address, or already a folder of its name here. Raises
    StoreError, naming the file, if one is missing or torn. A failed restore leaves nothing here, and the
    previous folder goes on copying.
    """
    _, name = split_run_address(text)
    path = (root / name).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(
            f"{path} already exists; continue it: etude resume {shlex.quote(str(path))}, or name another "
            "folder for runs: --output-dir"
        )
    address = Address(text.rstrip("/"), options)
    try:
        if (before := _read_head(address)) is None:
            raise RequestError(f"there is no run at {address.text}")
        with open_draft(path) as draft:
            head = os.urandom(16).hex()
            # Done first, so that the previous folder stops copying.
            _write_head(address, head)
            try:
                taken = _fill_draft(draft, address)
            except BaseException:
                _write_head(address, before["id"])
                raise
            _write_status(draft, address=address.text, head=head, copied_at=taken)
            return Restored(path, address.text, taken)
    except EtudeError:
        raise
    except Exception as error:  # whatever the driver raises
        raise StoreError(f"{address.text} cannot be read: {error_words(error)}") from error


def _fill_draft(draft: Path, address: Address) -> float:
    """Fill a new folder with the copy at an address; return when it was taken. Raises StoreError."""
    draft.mkdir()
    archive = draft / ARCHIVE
    address.download(ARCHIVE, archive)
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(draft, filter="data")
        facts = json.loads((draft / FACTS).read_text(encoding="utf-8"))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise StoreError(f"{address.text}/{ARCHIVE} is damaged: {error}; nothing was restored") from error
    for used in (archive, draft / FACTS):
        used.unlink()
    for name, expected in facts["files"].items():
        target = draft / name
        if _WRITTEN_ONCE.match(name):
            if ".." in target.parts or not target.is_relative_to(draft):
                raise StoreError(f"{address.text} has a file outside of the run: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            address.download(f"{FILES}/{name}", target)
        if target.stat().st_size != expected:
            raise StoreError(
                f"{address.text}/{FILES}/{name} is damaged: it has {target.stat().st_size} bytes instead of "
                f"{expected}; nothing was restored"
            )
    return float(facts["taken"])
