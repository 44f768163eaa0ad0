"""The run folder: all files of a run in one place, such as its journal, its config and its weights."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etude.core.errors import RequestError, StoreError
from etude.store.database import DATABASE, insert, open_database
from etude.store.files import FOLDER_MODE, delete_left_over, open_draft, private_folder, write_atomically
from etude.store.journal import Journal

TIME_STEP = "spent/time"
"""The journal step with how long the run has worked."""
CONFIG = "config.yml"
"""A copy of the run's config, for people."""
CONFIG_STEP = "config"
"""The journal step with the run's config as YAML."""
REQUEST_STEP = "request"
"""The journal step of an evaluation with its request."""
BASE_STEPS = "base/"
"""The prefix of the journal steps that record which files each model was loaded from."""
EXAMPLES_STEP = "run/examples"
"""The journal step with a digest of the run's examples."""
KEY_STEP = "run/key"
"""The journal step with the run's key, which the names of its jobs elsewhere contain."""
NAME_STEP = "run/name"
"""The journal step with the name that the run began with."""
LOCK = "lock"

_GIT_SECONDS = 5
_LONGEST_NAME = 200
"""In bytes. File systems take 255 for a name, and drafts of the folder need some of them."""
_FIELD = re.compile(r"^(Name|Version): *(.*?) *\r?$", re.MULTILINE)
"""Matches in the metadata of an installed package."""

_MOODS = (
    "agile brisk bright calm clear eager gentle golden keen lively lucid noble quick quiet serene swift vivid"
)
_FORMS = (
    "aria ballad bolero canon cantata coda fugue gavotte largo mazurka nocturne prelude rondo sonata waltz"
)


@dataclass(eq=False)
class RunFolder:
    """An open run folder. Use it as a context manager, or `close` it."""

    path: Path
    journal: Journal
    lock: RunLock | None
    """None if the run is only read."""

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str | None = None,
        *,
        config: str | None = None,
        request: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> RunFolder:
        """Make a new run folder in `root` and lock it.

        The journal gets the `config` as YAML, and the `request` of an evaluation. `environment.json` notes
        the `seed`. Raises RequestError when the run exists or the name cannot name a folder, StoreError when
        the folder cannot be written.
        """
        root = Path(root)
        name = new_run_name(root) if name is None else name
        if not isinstance(name, str):
            raise RequestError(f"a run's name is text, found {name!r:.80}")
        is_odd = not name.strip() or not name.isprintable() or name.startswith(".") or set(name) & set("/\\:")
        if is_odd or len(os.fsencode(name)) > _LONGEST_NAME:
            raise RequestError(
                f"{name!r} cannot name a run: use at most {_LONGEST_NAME} letters, digits, '-', '_' and '.'"
            )
        path = root / name
        if (path / DATABASE).exists():
            with cls.read(path) as other:  # Only a run with a config can be continued.
                has_config = other.journal.get(CONFIG_STEP) is not None
            go_on = f"continue it: etude resume {shlex.quote(str(path))}, or " if has_config else ""
            raise RequestError(f"run {path} already exists; {go_on}choose another name")
        # A run whose start was interrupted has left its lock.
        if path.is_dir() and any(path.iterdir()) and not (path / LOCK).exists():
            raise RequestError(f"{path} exists, and is no run; choose another name")
        try:
            private_folder(path).chmod(FOLDER_MODE)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; the output folder must be writable") from error
        environment = json.dumps(describe_environment(seed=seed), indent=2, ensure_ascii=False) + "\n"
        files, first = {"environment.json": environment}, dict[str, Any]({NAME_STEP: name})
        if config is not None:
            files[CONFIG], first[CONFIG_STEP] = config_copy(config), config
        if request is not None:
            first[REQUEST_STEP] = request
        return cls._open_locked(path, files, first)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open an existing run folder to continue the run, and lock it. Raises RequestError, StoreError."""
        return cls._open_locked(_existing(path))

    @classmethod
    def read(cls, path: Path | str) -> RunFolder:
        """Open an existing run folder read-only, while it may be written. Raises RequestError, StoreError."""
        path = _existing(path)
        return cls(path, Journal(path / DATABASE, read_only=True), None)

    @classmethod
    def _open_locked(
        cls, path: Path, files: Mapping[str, str] | None = None, first: Mapping[str, Any] | None = None
    ) -> RunFolder:
        lock = RunLock(path / LOCK)
        try:
            delete_left_over(path)
            for name, text in (files or {}).items():
                write_atomically(path / name, text, exact=True)  # The given text has no secrets.
            if first:
                # A draft first: a killed process leaves a journal with these values, or none.
                with open_draft(path / DATABASE) as draft, closing(open_database(draft)) as database:
                    insert(database, {key: json.dumps(value) for key, value in first.items()})
            return cls(path, Journal(path / DATABASE), lock)
        except StoreError:
            lock.release()
            raise

    @property
    def name(self) -> str:
        """The name of the run, which is its folder's name."""
        return self.path.name

    @property
    def first_name(self) -> str:
        """The name that the run began with. Its jobs have it, even if the folder was renamed."""
        return str(self.journal.get(NAME_STEP, self.name))

    async def change_config(self, text: str) -> None:
        """Store another config for the run, and its copy."""
        await self.journal.put(CONFIG_STEP, text)
        write_atomically(self.path / CONFIG, config_copy(text), exact=True)

    @property
    def is_blank(self) -> bool:
        """Whether the journal has only what is stored before any work, and the time spent."""
        known = (CONFIG_STEP, REQUEST_STEP, TIME_STEP, KEY_STEP, NAME_STEP, EXAMPLES_STEP, BASE_STEPS)
        return all(key.startswith(known) for key, _ in self.journal.scan())

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's weights. It is made when it is first asked for."""
        return private_folder(self.path / "checkpoints")

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file of the run, or None without the file. Raises StoreError."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read ({error}); delete it and resume the run") from error

    def close(self) -> None:
        """Commit the queue, close the journal and release the lock. Calling it twice is fine."""
        self.journal.close()
        if self.lock is not None:
            self.lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def temporary_run(name: str) -> Iterator[RunFolder]:
    """Make a run for the duration of the block, and remove its folder."""
    with TemporaryDirectory(prefix="etude-check-") as folder, RunFolder.create(Path(folder), name) as run:
        yield run


def config_copy(text: str) -> str:
    """Return the content of a run's `config.yml`."""
    return f"# A copy. Change settings with: etude resume RUN -o KEY=VALUE\n{text}"


def _existing(path: Path | str) -> Path:
    """Return the path of a run folder. Raises RequestError if it is not one."""
    path = Path(path)
    if (path / DATABASE).is_file():
        return path
    raise RequestError(f"{path} is not a run folder: it has no {DATABASE}. `etude runs list` shows the runs")


def new_run_name(root: Path, prefix: str = "") -> str:
    """Return a new name for a folder in `root`: the prefix, the day and two words."""
    day = datetime.date.today().isoformat()
    name = f"{prefix}{day}-{secrets.choice(_MOODS.split())}-{secrets.choice(_FORMS.split())}"
    candidates = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(candidate for candidate in candidates if not (root / candidate).exists())


def describe_environment(*, seed: int | None = None) -> dict[str, Any]:
    """Return Python, packages, machine and git commit, but no environment variables: they hold keys."""
    # Only the first lines are read: parsing the whole text as a message took 1.5 ms per package.
    texts = (
        package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
        for package in importlib.metadata.distributions()
    )
    fields = (dict(_FIELD.findall(text.partition("\n\n")[0])) for text in texts)
    packages = {each["Name"]: each.get("Version") for each in fields if "Name" in each}
    return {
        "etude": importlib.metadata.version("etude"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "seed": seed,
        "git": git_state(Path.cwd()),
        "packages": {name: packages[name] for name in sorted(packages, key=str.lower)},
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `{"commit", "dirty"}` of the checkout with `folder`, or None without a checkout or git."""
    git = ["git", "-C", str(folder)]
    try:
        commit, status = (
            subprocess.run(
                [*git, *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(status)}


_TRIES = 5
_PAUSE_SECONDS = 0.02


class RunLock:
    """Locks a run folder for this process, as a context manager or until `release`.

    The operating system frees the lock when the process ends.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock at `path`. Raises StoreError when another process has it."""
        self._file: int | None = _open(path, os.O_RDWR | os.O_CREAT)
        # Several tries, because a listing of runs holds the lock for an instant to see if it is free.
        for _ in range(_TRIES):
            if _try_lock(self._file):
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            self.release()
            pid = _read_pid(path)
            holder = f"process {pid}" if pid else "another process"
            holder = "this process already" if pid == os.getpid() else holder
            raise StoreError(
                f"run {path.parent.name} is in use by {holder}; "
                f"wait for it to end, or stop it, then type the command again"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Release the lock. Calling it twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds the lock at `path`, or None if it is free."""
    if not path.is_file():
        return None
    file = _open(path, os.O_RDONLY)
    try:
        return None if _try_lock(file, shared=True) else _read_pid(path)
    finally:
        os.close(file)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        needed = "readable" if flags == os.O_RDONLY else "writable"
        raise StoreError(f"{path}: {error.strerror}; the run folder must be {needed}") from error


def _try_lock(file: int, *, shared: bool = False) -> bool:
    try:
        import fcntl
    except ImportError as error:
        raise RequestError("run folders need Linux, macOS or WSL: this system has no file locks") from error
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_pid(path: Path) -> int:
    """Return the process id in a lock file, or 0 if there is none yet."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
