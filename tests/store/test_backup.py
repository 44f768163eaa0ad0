"""Copies of runs that go on, at storages that fail in all the ways they do, and runs made of them."""

import asyncio
import errno
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config.schema import StorageConfig
from etude.core.errors import RequestError, StoreError
from etude.store import backup
from etude.store.backup import Address, Backup, TakenOver, back_up, probe, restore_run
from etude.store.run_folder import RunFolder
from tests.store.faulty import Faulty
from tests.support import until
from tests.training import Watcher

PLACE = "faulty://bucket/run"


@pytest.fixture(autouse=True)
def heal() -> Iterator[None]:
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    yield
    Faulty.heal()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "runs", "run") as folder:
        yield folder


def faulty(**settings: Any) -> StorageConfig:
    return StorageConfig(**{"address": "faulty://bucket", "interval": 0.02, **settings})


def copies(run: RunFolder) -> Backup:
    return Backup(faulty(), run, Watcher())


def entries(folder: Path) -> dict[str, Any]:
    with RunFolder.read(folder) as run:
        return dict(run.journal.scan())


def status(run: RunFolder) -> dict[str, Any]:
    return dict(json.loads((run.path / "storage.json").read_text()))


async def test_a_run_is_copied_while_it_goes_on_and_at_its_end(run, tmp_path):
    async with back_up(faulty(), run, watcher := Watcher()):
        await run.journal.put("k/first", 1)
        await until(lambda: f"{PLACE}/run.tar.gz" in Faulty.store)
        assert entries(restore_run(PLACE, tmp_path / "meanwhile", {}).run)["k/first"] == 1
    assert watcher.warnings  # The folder that was made meanwhile has taken the run over.


async def test_journal_and_files_of_a_copy_belong_together(run, tmp_path):
    """A writer adds a version, notes it, and deletes the one before, as fast as it can."""
    over = asyncio.Event()

    async def train() -> None:
        for number in range(1, 100_000):
            folder = run.checkpoints / f"v{number}"
            folder.mkdir()
            (folder / "weights").write_bytes(random.Random(number).randbytes(number % 97))
            await run.journal.put("version", number)
            shutil.rmtree(run.checkpoints / f"v{number - 2}", ignore_errors=True)
            await asyncio.sleep(0.2 * random.random())
            if over.is_set():
                return

    task = asyncio.create_task(train())
    made = copies(run)
    for number in range(6):
        await asyncio.to_thread(made.copy)
        folder = restore_run(PLACE, tmp_path / str(number), {}).run
        made._head = json.loads(Address(PLACE, {}).read("head.json"))["id"]  # It has not taken over.
        version = entries(folder).get("version", 0)
        if version:
            weights = (folder / "checkpoints" / f"v{version}" / "weights").read_bytes()
            assert weights == random.Random(version).randbytes(version % 97)
    over.set()
    await task


def test_a_copy_has_what_a_link_leads_to_and_the_weights_of_a_target_called_logs(run, tmp_path):
    (tmp_path / "notes").write_text("elsewhere")
    (run.path / "notes").symlink_to(tmp_path / "notes")
    (run.checkpoints / "logs" / "v1").mkdir(parents=True)
    (run.checkpoints / "logs" / "v1" / "weights").write_text("weights")
    copies(run).copy()
    folder = restore_run(PLACE, tmp_path / "new", {}).run
    assert (folder / "notes").read_text() == "elsewhere"
    assert (folder / "checkpoints" / "logs" / "v1" / "weights").read_text() == "weights"


@pytest.mark.parametrize(
    "error",
    [ConnectionError("no route to host"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["away", "full"],
)
async def test_a_storage_that_fails_for_a_while_is_told_once_and_used_again(run, tmp_path, error):
    async with back_up(faulty(), run, watcher := Watcher()):
        await run.journal.put("k", 1)
        await until((run.path / "storage.json").exists)
        await until(lambda: status(run).get("copied_at") is not None)
        Faulty.error = error
        await run.journal.put("k", 2)
        await until(lambda: str(error.args[-1]) in (status(run)["last_error"] or ""))
        await asyncio.sleep(0.2)  # It fails a few times more.
        Faulty.heal()
        await until(lambda: status(run).get("last_error") is None)
    assert len(watcher.warnings) == 1
    assert PLACE in watcher.warnings[0] and error.args[-1] in watcher.warnings[0]
    assert entries(restore_run(PLACE, tmp_path / "new", {}).run)["k"] == 2


async def test_a_storage_that_hangs_holds_a_run_up_no_longer_than_it_says(run, monkeypatch):
    monkeypatch.setattr(backup, "PATIENCE", 0.2)
    async with asyncio.timeout(30):
        async with back_up(faulty(), run, watcher := Watcher()):
            await run.journal.put("k", 1)
            Faulty.hangs = True
    assert "within 0.2 s" in watcher.warnings[0]


async def test_a_run_that_cannot_be_copied_at_its_beginning_is_not_begun(run):
    Faulty.error = PermissionError(errno.EACCES, "denied")
    with pytest.raises(RequestError, match=r"denied.*credentials.*: -o storage=null"):
        async with back_up(faulty(), run, Watcher()):
            pass


async def test_a_bucket_that_is_deleted_is_not_taken_for_files_that_change(run):
    (ours := copies(run)).copy()
    await run.journal.put("k", 1)
    Faulty.error = FileNotFoundError("no bucket")
    with pytest.raises(FileNotFoundError, match="no bucket"):
        ours.copy()


async def test_a_run_of_the_same_name_is_not_overwritten(run, tmp_path):
    copies(run).copy()
    with (
        RunFolder.create(tmp_path / "others", "run") as other,
        pytest.raises(RequestError, match=f"etude resume {PLACE}"),
    ):
        copies(other).copy()


async def test_a_folder_whose_run_was_taken_over_copies_nothing_more(run, tmp_path):
    older = copies(run)
    older.copy()
    with RunFolder.open(restore_run(PLACE, tmp_path / "new", {}).run) as new:
        newer = copies(new)
        await new.journal.put("k", "new")
        newer.copy()
        with pytest.raises(TakenOver, match=r"process \d+ on \S+$"):
            older.copy()
        with pytest.raises(TakenOver):
            async with back_up(faulty(), run, Watcher()):
                pass
    assert entries(restore_run(PLACE, tmp_path / "again", {}).run)["k"] == "new"


@pytest.mark.parametrize("damage", [b"", b"half", None], ids=["empty", "torn", "gone"])
@pytest.mark.parametrize("name", ["run.tar.gz", "files/checkpoints/v1/weights"])
async def test_what_is_damaged_is_refused_by_name_and_nothing_is_left(run, tmp_path, name, damage):
    (run.checkpoints / "v1").mkdir()
    (run.checkpoints / "v1" / "weights").write_bytes(b"weights")
    before = copies(run)
    before.copy()
    if damage is None:
        Address(PLACE, {}).delete(name)
    else:
        Address(PLACE, {}).write(name, damage)
    with pytest.raises(StoreError, match=f"{PLACE}/.*{name.rpartition('/')[2]} is (damaged|missing)"):
        restore_run(PLACE, tmp_path / "new", {})
    assert not list((tmp_path / "new").iterdir())
    before.copy()  # The old folder still owns the copies.


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"error": FileNotFoundError("no bucket")}, "FileNotFoundError: no bucket.*`storage.options`"),
        ({"tears": True}, "faulty://bucket: .* read .* written"),
        ({"hangs": True}, "within 0.1 s"),
    ],
)
async def test_a_storage_that_takes_no_backups_is_told(fault, said, monkeypatch):
    if "hangs" in fault:
        monkeypatch.setattr(backup, "PATIENCE", 0.1)
    for name, value in fault.items():
        setattr(Faulty, name, value)
    with pytest.raises(RequestError, match=said):
        await probe(faulty())
