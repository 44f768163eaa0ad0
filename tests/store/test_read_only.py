"""A run folder that may only be read: another user's, an archive's, a snapshot's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.store.facts import facts_of, histories_of
from etude.store.log import jobs_of
from etude.store.run_folder import LOCK, RunFolder, locked_by

NOBODY = 65534

WRITER = """
import asyncio, sys
from etude.store.run_folder import RunFolder

async def main():
    run = RunFolder.create(sys.argv[1], "run")
    for number in range(200):
        await run.journal.put(f"step/{number:04d}", "x" * 300)
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that others may look into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


def may_only_read(run: Path, work: Callable[[], None]) -> None:
    """Do `work` as somebody who may read the run and not write to it."""
    for path in run.iterdir():
        path.chmod(0o444)
    run.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            code = 0
        except Exception:  # noqa: BLE001  the parent sees by the exit code that there was one
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def require_readable(run: Path, entries: int) -> None:
    assert facts_of(run).state == "unfinished", facts_of(run).problem
    assert histories_of(run)[None].epochs == ()
    assert jobs_of(run) == []
    assert locked_by(run / LOCK) is None
    with RunFolder.read(run) as folder:
        assert sum(key.startswith("step/") for key, _ in folder.journal.scan()) == entries


def test_a_run_that_was_closed_can_be_read(root: Path) -> None:
    RunFolder.create(root, "run").close()
    assert not (root / "run" / "run.db-wal").exists()
    may_only_read(root / "run", lambda: require_readable(root / "run", 0))
    assert not (root / "run" / "run.db-wal").exists()


def test_one_whose_process_was_killed_can_be_too_with_its_log(root: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert (root / "run" / "run.db-wal").stat().st_size > 50_000
    (root / "run" / "run.db-shm").unlink()
    may_only_read(root / "run", lambda: require_readable(root / "run", 200))
