"""A journal that is not as it was written is noticed when a run goes on with it, and can be repaired."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from etude.core.errors import StoreError
from etude.core.history import EpochEntry, ValidationEntry
from etude.core.job import TrainingJobRef
from etude.store.database import open_database
from etude.store.journal import Journal
from etude.store.log import EpochLog, Submission
from etude.store.mark import mark_of, read_mark
from etude.store.repair import check_run, repair_run

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
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose process was killed."""
    run = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", WRITER, str(run / "run.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    return run


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def content(run: Path) -> dict[str, object]:
    with Journal(run / "run.db") as journal:
        return dict(journal.scan())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    Journal(path).close()  # So that all is in it, and nothing in its log.
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))


def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "run.db")) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_run_that_was_killed_is_whole(run: Path) -> None:
    assert (run / "run.db-wal").stat().st_size > 100_000
    assert check_run(run) == []
    assert len(content(run)) == 300


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("run.db-wal", Path.unlink),
        ("run.db-wal", truncate),
        ("run.db", lambda path: path.write_bytes(b"")),
        ("run.db-wal", lambda path: path.write_bytes(b"")),
    ],
    ids=["no log", "half a log", "an empty database", "an empty log"],
)
def test_entries_that_are_gone_are_missed(run: Path, file: str, harm: Callable[[Path], object]) -> None:
    harm(run / file)
    with pytest.raises(StoreError, match=r"run\.db is damaged: .* --repair"):
        Journal(run / "run.db")


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("loop.db-wal", Path.unlink),
        ("loop.db", overwrite),
        ("loop.db-mark", lambda path: path.write_bytes(b"12")),
    ],
    ids=["no log", "overwritten pages", "another mark"],
)
def test_a_journal_of_ones_own_is_told_of_its_own_files_and_of_no_command_for_runs(
    run: Path, tmp_path: Path, file: str, harm: Callable[[Path], object]
) -> None:
    for part in ("", "-wal", "-mark"):
        shutil.copy(run / f"run.db{part}", tmp_path / f"loop.db{part}")
    harm(tmp_path / file)
    with pytest.raises(StoreError, match=r"loop\.db") as raised:
        Journal(tmp_path / "loop.db")
    told = str(raised.value)
    assert "put whole copies of loop.db and the files whose names begin with loop.db- in their place" in told
    assert "etude runs" not in told and "run.db" not in told
    for path in tmp_path.glob("loop.db*"):
        path.unlink()
    Journal(tmp_path / "loop.db").close()  # As it says: all of them deleted, it begins anew.


def test_an_empty_journal_of_ones_own_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "loop.db").touch()
    with pytest.raises(StoreError, match=r"loop\.db holds nothing: nothing was stored in it") as raised:
        Journal(tmp_path / "loop.db", read_only=True)
    assert "etude resume" not in str(raised.value)


async def test_how_many_are_gone_is_said_and_repair_keeps_the_rest(run: Path) -> None:
    truncate(run / "run.db-wal")
    (line,) = check_run(run)
    lost = int(line.split()[0])
    assert 100 < lost < 300
    assert "gone from its end" in line
    repaired = await repair_run(run)
    assert repaired.kept == 300 - lost
    assert repaired.copy.name == "run.db.damaged-1"
    assert check_run(run) == []
    assert [key for key in content(run) if key.startswith("step/")] == [
        f"step/{i:04d}" for i in range(300 - lost)
    ]


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


async def test_an_altered_entry_is_named_and_taken_out(run: Path) -> None:
    expected = content(run)
    with sqlite3.connect(run / "run.db") as database:
        database.execute("UPDATE steps SET value='\"y\"' WHERE key='step/0007'")
    assert check_run(run) == ["1 entry is not as written: step/0007"]
    assert (await repair_run(run)).kept == 299
    del expected["step/0007"]
    assert {key: value for key, value in content(run).items() if key.startswith("step/")} == expected


async def test_pages_that_cannot_be_read_cost_their_rows_alone(run: Path) -> None:
    content(run)
    with (run / "run.db").open("r+b") as file:
        file.seek(4096 * 12)
        file.write(b"\xff" * 4096)
    (line, *_) = check_run(run)
    assert "pages of the database are damaged" in line
    repaired = await repair_run(run)
    assert 250 < repaired.kept < 300
    assert check_run(run) == []


async def test_a_damaged_mark_is_no_loss(run: Path) -> None:
    content(run)
    mark_of(run / "run.db").write_bytes(b"00000000000000000999 00000000\n")
    (line,) = check_run(run)
    assert "run.db-mark is damaged" in line
    assert (await repair_run(run)).kept == 300
    assert check_run(run) == []


async def test_deleted_entries_do_not_count_as_lost(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.db") as journal:
        for number in range(20):
            await journal.put(f"{number % 2}/{number}", number)
        assert read_mark(journal.path) == 20
        await journal.delete("1/")
        assert read_mark(journal.path) == 19
        await journal.delete("0/")
        assert read_mark(journal.path) == 0
    with Journal(tmp_path / "run.db") as journal:
        assert list(journal.scan()) == []


async def test_after_a_gap_the_epochs_are_done_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.db") as journal:
        log = EpochLog(journal)
        for epoch in range(4):
            await log.sampled_from(epoch, None)
            await log.add_submission(
                epoch, Submission(ref=TrainingJobRef(run_id=f"job {epoch}", backend="local"))
            )
            await log.add_epoch(EpochEntry(epoch=epoch + 1, timestamp="now"))
            await log.add_validation(ValidationEntry(epoch=epoch + 1, timestamp="now"))
        await journal.forget("trainer/epoch/00000002")
    repaired = await repair_run(tmp_path)
    assert repaired.forgotten == 2
    with Journal(tmp_path / "run.db") as journal:
        log = EpochLog(journal)
        history = log.history("run")
        assert [entry.epoch for entry in history.epochs] == [1]
        assert [entry.epoch for entry in history.validations] == [1]
        assert [epoch for epoch, _, _ in log.submissions()] == [0]
        assert log.attempt(1) == 1
