"""Backing up while a run goes on, with storages that fail in all the ways they do."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.backup.attach import backed_up
from etude.backup.manifest import Superseded
from etude.backup.restore import fetch
from etude.config.storage import StorageConfig
from etude.core.errors import RequestError
from etude.store.run_folder import RunFolder
from tests.backup.faulty import Faulty
from tests.support import pass_time, until
from tests.training import Watcher


@pytest.fixture(autouse=True)
def healed() -> Iterator[None]:
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    Faulty.released.clear()
    yield
    Faulty.heal()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "runs", "run") as folder:
        yield folder


def faulty(**settings: Any) -> StorageConfig:
    return StorageConfig(**{"address": "faulty://bucket", "interval": 0.02, "patience": 60, **settings})


def restored(tmp_path: Path, name: str = "new") -> dict[str, Any]:
    with RunFolder.read(fetch("faulty://bucket/run", tmp_path / name, {}).run) as folder:
        return {key: value for key, value in folder.journal.scan() if not key.startswith("storage/")}


async def test_a_run_is_backed_up_while_it_goes_on_and_at_its_end(run, tmp_path):
    watcher = Watcher()
    async with backed_up(faulty(), run, watcher) as backup:
        kept = {}
        while backup.figures()["backups"] <= 3:
            kept[f"k/{len(kept):06d}"] = len(kept)
            await run.journal.put(max(kept), kept[max(kept)])
            await asyncio.sleep(0.005)
        await run.journal.put("k/last", 1)
    assert restored(tmp_path) == {**kept, "k/last": 1}


@pytest.mark.parametrize(
    "error",
    [ConnectionError("no route to host"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["away", "full"],
)
async def test_a_storage_that_fails_for_a_while_is_told_once_and_used_again(run, tmp_path, error):
    watcher = Watcher()
    async with backed_up(faulty(), run, watcher) as backup:
        await until((run.path / "storage.json").exists)
        Faulty.error = error
        await run.journal.put("k", 1)
        await until(lambda: backup.figures()["failures"] >= 2)
        assert backup.figures()["entries_behind"] == 1
        assert backup.figures()["lag_seconds"] > 0
        await until(lambda: json.loads((run.path / "storage.json").read_text())["failures"] >= 2)
        status = json.loads((run.path / "storage.json").read_text())
        assert str(error.args[-1]) in status["last_error"]
        Faulty.heal()
        assert await backup.wait(60)
        assert backup.figures()["entries_behind"] == 0
    assert [text for text in watcher.warnings if str(error.args[-1]) in text] == watcher.warnings
    assert len(watcher.warnings) == 1
    assert any("takes backups again" in text for text in watcher.events)
    assert restored(tmp_path) == {"k": 1}


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_storage_that_stays_away_holds_a_run_up_no_longer_than_it_says(run, fault):
    watcher, loop = Watcher(), asyncio.get_running_loop()

    async def hurry() -> None:
        while True:
            pass_time(5.0)
            await asyncio.sleep(0.001)

    async with backed_up(faulty(patience=600, wait=True), run, watcher) as backup:
        if fault == "hangs":
            Faulty.hangs = True
        else:
            Faulty.error = ConnectionError("no route to host")
        await run.journal.put("k", 1)
        hurrying = asyncio.create_task(hurry())
        for _ in range(3):
            before = loop.time()
            await backup.epoch_over()
            assert loop.time() - before < 700
        before = loop.time()
    assert loop.time() - before < 700
    hurrying.cancel()
    assert "entries of the journal that are not backed up after 600 s: 1." in watcher.warnings[-1]
    assert f"etude resume {run.path}" in watcher.warnings[-1]


async def test_a_run_waits_at_the_end_of_an_epoch_where_it_should(run):
    Faulty.seconds = 0.05
    async with backed_up(faulty(wait=True, interval=60), run, Watcher()) as backup:
        await run.journal.put("k", 1)
        await backup.epoch_over()
        assert backup.figures()["entries_behind"] == 0
        backup.config = faulty(wait=False, interval=60)
        await run.journal.put("k", 2)
        await backup.epoch_over()
        assert backup.figures()["entries_behind"] == 1


async def test_a_run_that_cannot_be_backed_up_from_its_beginning_is_not_begun(run):
    Faulty.error = PermissionError("no such bucket, or not yours")
    watcher = Watcher()
    with pytest.raises(RequestError, match=r"faulty://bucket/run: no such bucket.*-o storage=null"):
        async with backed_up(faulty(), run, watcher):
            raise AssertionError("begun")
    assert not watcher.warnings, "that it goes on would be untrue"
    # One that was backed up before goes on.
    Faulty.heal()
    async with backed_up(faulty(), run, Watcher()):
        pass
    Faulty.error = ConnectionError("away")
    watcher = Watcher()
    async with backed_up(faulty(patience=0.1), run, watcher):
        await run.journal.put("k", 1)
    assert "cannot be backed up: ConnectionError: away" in watcher.warnings[0]


async def test_a_run_that_fails_before_it_has_begun_leaves_no_backup_in_the_way(tmp_path):
    fails = pytest.raises(RequestError, match="no such model")
    with RunFolder.create(tmp_path / "runs", "run") as run, fails:
        async with backed_up(faulty(), run, Watcher()):
            raise RequestError("no such model")
    assert not [path for path in Faulty.store if "/run/" in path]
    shutil.rmtree(run.path)
    with RunFolder.create(tmp_path / "runs", "run") as again:
        async with backed_up(faulty(), again, Watcher()):
            await again.journal.put("k", 1)
        with pytest.raises(RequestError, match="no such model"):
            async with backed_up(faulty(), again, Watcher()):
                raise RequestError("no such model")
    assert restored(tmp_path) == {"k": 1}


async def test_a_storage_that_lets_two_heads_overwrite_each_other_is_refused(run):
    Faulty.overwrites = True
    with pytest.raises(RequestError, match="two heads would not notice each other"):
        async with backed_up(faulty(), run, Watcher()):
            raise AssertionError("begun")


async def test_what_reads_back_otherwise_does_not_count(run):
    async with backed_up(faulty(patience=0.2), run, watcher := Watcher()) as backup:
        Faulty.tears = True
        await run.journal.put("k", 1)
        assert not await backup.wait(0.2)
        await until(lambda: bool(watcher.warnings))
    assert "is not what was written" in watcher.warnings[0]


async def test_a_storage_that_keeps_everything_is_told_and_used(run, tmp_path):
    Faulty.undeletable = True
    async with backed_up(faulty(), run, watcher := Watcher()) as backup:
        for number in range(5):
            await run.journal.put("k", number)
            assert await backup.wait(60)
    assert len(watcher.warnings) == 1
    assert "what is no longer needed cannot be deleted: PermissionError" in watcher.warnings[0]
    assert restored(tmp_path) == {"k": 4}


async def test_a_head_that_was_superseded_stops_and_says_so(run, tmp_path):
    with pytest.raises(Superseded, match="another head goes on with run run") as raised:
        async with backed_up(faulty(), run, Watcher()) as backup:
            await run.journal.put("k", 1)
            assert await backup.wait(60)
            await asyncio.to_thread(restored, tmp_path)
            await run.journal.put("k", 2)
            await asyncio.sleep(60)
            raise AssertionError("went on")
    assert "in its own folder alone" in str(raised.value)
    # And is refused from then on.
    with pytest.raises(Superseded):
        async with backed_up(faulty(), run, Watcher()):
            raise AssertionError("begun")
