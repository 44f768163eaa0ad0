"""The disk of run folders: its room, and whether it keeps what runs rely on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import statistics
import tempfile
import time
from pathlib import Path

from etude.core.errors import EtudeError
from etude.models.memory import shown_bytes
from etude.preflight import machine
from etude.preflight.finding import Findings
from etude.store.database import open_database
from etude.store.files import open_private
from etude.store.lock import RunLock
from etude.store.run_folder import RunFolder

_LITTLE_DISK = 2e9
_SYNCS = 8
_SLOW_SYNC_SECONDS = 0.1
"""Each batch of a journal's entries waits for one."""
_ELSEWHERE = "keep runs on a local disk: --output-dir FOLDER, and back them up with a `storage` block"


def examine_disk(folder: Path, findings: Findings) -> None:
    """Look at the disk that `folder` is on, or would be; a few files are written there, and deleted again."""
    free, existing = machine.free_disk(folder), machine.existing_folder(folder)
    if free < _LITTLE_DISK:
        findings.warn(
            "disk",
            f"only {shown_bytes(free)} free in {folder.absolute()}; free some, or name another folder "
            "with --output-dir",
        )
    else:
        findings.ok("disk", f"{shown_bytes(free)} free in {folder.absolute()}")
    try:
        with tempfile.TemporaryDirectory(prefix=".etude-doctor-", dir=existing) as scratch:
            _examine_file_system(Path(scratch), existing, findings)
    except OSError as error:
        findings.fail(
            "disk",
            f"{existing} may not be written ({error.strerror}): run folders need to be made there; "
            "mend its permissions, or name another folder with --output-dir",
        )


def _examine_file_system(scratch: Path, folder: Path, findings: Findings) -> None:
    kind = file_system(folder)
    what = "file system" if kind is None else f"file system ({kind})"
    problems = [*_journal_problems(scratch), *_lock_problems(scratch), *_privacy_problems(scratch)]
    for problem in problems:
        findings.fail(what, f"{folder}: {problem}")
    seconds = _sync_seconds(scratch)
    if seconds > _SLOW_SYNC_SECONDS:
        findings.warn(
            what,
            f"{folder} takes {1000 * seconds:.0f} ms until a write is on the disk, and every batch of a "
            f"journal's entries waits for that; {_ELSEWHERE}",
        )
    elif not problems:
        findings.ok(
            what, f"locks, journals and permissions work; a write is on the disk in {1000 * seconds:.1f} ms"
        )


def _journal_problems(scratch: Path) -> list[str]:
    """Whether a run folder can be made, written to, and read while it is."""

    async def keep() -> object:
        with RunFolder.create(scratch, "run") as run:
            await run.journal.put("key", "value")
            with contextlib.closing(open_database(run.path / "run.db", read_only=True)) as reader:
                return reader.execute("SELECT count(*) FROM steps").fetchone()[0]

    try:
        count = asyncio.run(keep())
    except EtudeError as error:
        return [f"a journal cannot be kept there: {error}. {_ELSEWHERE}"]
    return [] if count == 1 else [f"a journal's entry was not there when it was read again; {_ELSEWHERE}"]


def _lock_problems(scratch: Path) -> list[str]:
    """Whether a lock keeps others out."""
    try:
        first = RunLock(scratch / "lock")
        try:
            RunLock(scratch / "lock").release()
        except EtudeError:
            return []
        finally:
            first.release()
    except (EtudeError, OSError) as error:
        return [f"files cannot be locked there ({error}); {_ELSEWHERE}"]
    return [f"locks of files mean nothing there: two processes could work on one run; {_ELSEWHERE}"]


def _privacy_problems(scratch: Path) -> list[str]:
    """Whether files can be kept to their user."""
    with open_private(scratch / "private", "w"):
        pass
    if stat.S_IMODE((scratch / "private").stat().st_mode) & 0o077:
        return [f"everybody may read what is written there, whatever its permissions say; {_ELSEWHERE}"]
    return []


def _sync_seconds(scratch: Path) -> float:
    """The median time until a small write is on the disk."""
    times = []
    with open_private(scratch / "synced", "wb") as file:
        for number in range(_SYNCS):
            begun = time.perf_counter()
            os.pwrite(file.fileno(), bytes(4096), 4096 * number)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def file_system(path: Path) -> str | None:
    """The kind of file system that a folder is on, as Linux names it; None elsewhere."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    mounts = [line.split(" ")[1:3] for line in lines if line.count(" ") >= 2]
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount[0].replace("\\040", " "))]
    # Of two at one place the later one is on top.
    return max(reversed(around), key=lambda mount: len(mount[0]), default=[None, None])[1]
