"""A journal that is not as it was written is refused, also after its process or its disk gave up."""

import os
import random
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from etude.core.errors import StoreError
from etude.loop.lifecycle import check_journal
from etude.store.database import open_database
from etude.store.journal import Journal
from tests.forked import Forked
from tests.support import one_quick

WRITER = """
import asyncio, sys
from etude.store.journal import Journal

async def main():
    journal = Journal(sys.argv[1])
    for number in range(300):
        await journal.put(f"step/{number:04d}", "x" * 300)
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
"""Killed before it closes the journal: its last commits are in the write-ahead log alone."""


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose process was killed."""
    run = tmp_path_factory.mktemp("killed")
    process = Forked(["-c", WRITER, str(run / "run.db")], run, dict(os.environ), program="python")
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    return run


@pytest.fixture
def run(killed_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run, tmp_path / "run"))


def content(run: Path) -> dict[str, object]:
    with Journal(run / "run.db") as journal:
        return dict(journal.scan())


def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "run.db")) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_run_that_was_killed_is_whole(run: Path) -> None:
    assert (run / "run.db-wal").stat().st_size > 100_000
    assert check_journal(run) == []
    assert len(content(run)) == 300


def test_no_flipped_byte_goes_unnoticed(run: Path, tmp_path: Path) -> None:
    """Either the journal is refused, or it gives what was written."""
    expected, chance, refused = content(run), random.Random(0), 0  # Now without a log.
    size = (run / "run.db").stat().st_size
    for number in range(60):
        other = Path(shutil.copytree(run, tmp_path / str(number)))
        with (other / "run.db").open("r+b") as file:
            offset = chance.randrange(size)
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        try:
            assert content(other) == expected, offset
        except StoreError:
            refused += 1
    assert refused > 30


def test_an_altered_entry_is_named(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as database:
        database.execute("UPDATE steps SET value='\"y\"' WHERE key='step/0007'")
    assert [line.rpartition(": ")[2] for line in check_journal(run)] == ["step/0007"]


def test_pages_that_cannot_be_read_are_told(run: Path) -> None:
    content(run)
    with (run / "run.db").open("r+b") as file:
        file.seek(4096 * 12)
        file.write(b"\xff" * 4096)
    (line, *_) = check_journal(run)
    assert "pages" in line and "damaged" in line
    with pytest.raises(StoreError, match=r"run\.db.*pages.*`etude resume ADDRESS`"):
        Journal(run / "run.db")


ENDLESS_WRITER = """
import asyncio, sys
from etude.store.journal import Journal

async def main():
    journal = Journal(sys.argv[1])
    async def worker(name):
        for count in range(10**9):
            key = f"{name}/{count}"
            async def fn():
                journal.put_soon(f"sum/{name}", {"count": count})
                return count
            await journal.step(key, fn)
            print(key, flush=True)
    await asyncio.gather(*(worker(index) for index in range(8)))

asyncio.run(main())
"""

FULL_DISK = """
import asyncio, resource, sys
from etude.core.errors import StoreError
from etude.store.journal import Journal

async def main():
    journal = Journal(sys.argv[1])
    # The system refuses to let a file grow beyond this: what a full disk looks like to SQLite.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
    async def put(index):
        await journal.put(str(index), "x" * 4000)
        print("kept", index, flush=True)
    for start in range(0, 10000, 10):
        outcomes = await asyncio.gather(*(put(start + i) for i in range(10)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            assert all(isinstance(outcome, StoreError) for outcome in failed), failed
            print("failed", len(failed), failed[0], flush=True)
            return

asyncio.run(main())
"""


@pytest.mark.parametrize("seed", one_quick(*range(4)))
def test_every_acknowledged_step_survives_kill_9(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "run.db"
    process = Forked(["-c", ENDLESS_WRITER, str(path)], tmp_path, dict(os.environ), program="python")
    seen = [process.stdout.readline().strip()]
    deadline = time.monotonic() + random.Random(seed).uniform(0.0, 0.3)
    while len(seen) < 2 or time.monotonic() < deadline:
        seen.append(process.stdout.readline().strip())
    process.kill()
    seen += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.communicate()
    with Journal(path) as journal:
        kept = dict(journal.scan())
    assert len(seen) > 1
    assert all(kept[key] == int(key.split("/")[1]) for key in seen)
    sums = {key.removeprefix("sum/"): kept.pop(key)["count"] for key in list(kept) if key.startswith("sum/")}
    assert all(sums[key.split("/")[0]] >= count for key, count in kept.items()), "counted before it was kept"


def test_a_full_disk_fails_every_waiter_and_keeps_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    process = Forked(["-c", FULL_DISK, str(path)], tmp_path, dict(os.environ), program="python")
    lines = process.communicate(timeout=60)[0].splitlines()
    assert process.wait() == 0
    kept = [line.split()[1] for line in lines if line.startswith("kept")]
    assert len(kept) > 10
    assert lines[-1].startswith("failed 10 "), lines[-1]
    assert "run.db" in lines[-1] and "disk is full" in lines[-1]
    with Journal(path) as journal:
        assert {key for key, _ in journal.scan()} == set(kept)
