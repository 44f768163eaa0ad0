"""Backups of a run folder, and folders made of them: the same state, or an error that names what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etude.backup import changes
from etude.backup.address import Address
from etude.backup.manifest import Superseded, name_of, newest, numbers
from etude.backup.restore import fetch
from etude.backup.writer import BackupWriter
from etude.core.errors import RequestError, StoreError
from etude.store.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "runs", "run") as folder:
        yield folder


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"file://{tmp_path}/storage/run"


def writer(run: RunFolder, place: str) -> BackupWriter:
    return BackupWriter(run.path, Address(place, {}), 1.0)


def entries(folder: RunFolder) -> dict[str, Any]:
    return {key: value for key, value in folder.journal.scan() if not key.startswith("storage/")}


def files(path: Path) -> dict[str, bytes]:
    """The files of a run folder, without its journal and how its storage stands."""
    own = {"run.db", "run.db-wal", "run.db-shm", "run.db-mark", "lock", "storage.json"}
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if name not in own}


def make_version(run: RunFolder, number: int, data: bytes) -> Path:
    """A folder of weights, which appears by one rename."""
    draft = run.checkpoints / f"v{number}.part"
    draft.mkdir()
    (draft / "weights.bin").write_bytes(data)
    return draft.rename(run.checkpoints / f"v{number}")


@pytest.mark.parametrize("seed", range(4))
async def test_every_backup_is_the_run_as_it_was(run, place, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(changes, "_TOGETHER", 3)
    if seed % 2:
        monkeypatch.setattr(changes, "_SEGMENT_BYTES", 400)
    choice, backups, number = random.Random(seed), writer(run, place), 0
    for step in range(40):
        for _ in range(choice.randrange(12)):
            key = f"{choice.choice('abc')}/{choice.randrange(30):02d}"
            match choice.randrange(8):
                case 0:
                    await run.journal.delete(key[: choice.choice((1, 4))])
                case 1:
                    number += 1
                    make_version(run, number, choice.randbytes(50))
                case _:
                    await run.journal.put(key, {"text": "é" * choice.randrange(60), "step": step})
        made = backups.back_up()
        backups.tidy()
        if step % 8 == 7:
            assert seed % 2 or len(made.segments) <= 8
            there = {f"objects/{path.parent.name}/{path.name}" for path in objects(tmp_path)}
            earlier = newest_but_one(place)
            assert there == {stored.name for each in (made, earlier) for stored in each.objects()}
            # On another machine from here.
            with closing(run):
                expected, held = entries(run), files(run.path)
            run = RunFolder.open(fetch(place, tmp_path / f"machine-{step}", {}).run)
            assert entries(run) == expected
            assert files(run.path) == held
            backups = writer(run, place)
    expected, held = entries(run), files(run.path)
    restored = fetch(place, tmp_path / "new", {})
    run.close()
    with RunFolder.open(restored.run) as again:
        assert entries(again) == expected
        assert files(again.path) == held
        assert restored.entries == len([*again.journal.scan()]) - 1


def newest_but_one(place: str) -> Any:
    from etude.backup.manifest import decode

    address = Address(place, {})
    return decode(address.read(name_of(numbers(address)[-2])), "manifest")


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "storage/run/objects").rglob("*") if path.is_file()]


async def test_weights_that_are_deleted_meanwhile_belong_to_no_backup_or_are_whole_in_it(
    run, place, monkeypatch
):
    """The journal of a backup never speaks of a version that the backup has not."""
    make_version(run, 1, b"one")
    backups, listings = writer(run, place), []
    real = changes.snapshot

    def pruning(path: Path) -> Any:
        # Between the listing of the files and the commit that they should belong to.
        if not listings:
            listings.append(1)
            make_version(run, 2, b"two")
            (run.checkpoints / "v1" / "weights.bin").unlink()
            (run.checkpoints / "v1").rmdir()
        return real(path)

    backups.back_up()
    monkeypatch.setattr("etude.backup.writer.snapshot", pruning)
    assert sorted(backups.back_up().files) == ["checkpoints/v2/weights.bin", "environment.json"]


async def test_a_run_that_was_begun_without_a_storage_is_backed_up_whole(run, place, tmp_path):
    for number in range(50):
        await run.journal.put(f"k/{number}", number)
    writer(run, place).back_up()
    with RunFolder.read(fetch(place, tmp_path / "new", {}).run) as again:
        assert entries(again) == {f"k/{number}": number for number in range(50)}


async def test_nothing_new_writes_nothing(run, place, tmp_path):
    backups = writer(run, place)
    first = backups.back_up()
    assert backups.back_up() is first
    assert numbers(Address(place, {})) == [1]


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "altered": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", ["journal", "weights"])
async def test_a_damaged_object_is_refused_by_name(run, place, tmp_path, what, damage):
    make_version(run, 1, b"weights")
    await run.journal.put("k", "value")
    made = writer(run, place).back_up()
    stored = made.segments[0].object if what == "journal" else made.files["checkpoints/v1/weights.bin"]
    DAMAGE[damage](tmp_path / "storage/run" / stored.name)
    with pytest.raises(StoreError, match=stored.sha256) as raised:
        fetch(place, tmp_path / "new", {})
    assert "Nothing was restored" in str(raised.value) or "nothing was restored" in str(raised.value)
    assert not list((tmp_path / "new").iterdir())
    # Nobody took the run over for that.
    assert numbers(Address(place, {})) == [1]


@pytest.mark.parametrize("damage", ["torn", "altered", "empty"])
async def test_a_damaged_manifest_is_refused_by_name_and_the_one_before_it_works(
    run, place, tmp_path, damage
):
    backups = writer(run, place)
    await run.journal.put("k", 1)
    backups.back_up()
    await run.journal.put("k", 2)
    backups.back_up()
    manifest = tmp_path / "storage/run" / name_of(2)
    data = manifest.read_text()
    changed = {"torn": data[:100], "altered": data.replace('"position": 2', '"position": 1'), "empty": ""}
    manifest.write_text(changed[damage])
    with pytest.raises(StoreError, match=f"{name_of(2)} is damaged") as raised:
        fetch(place, tmp_path / "new", {})
    assert "delete this object" in str(raised.value)
    manifest.unlink()
    with RunFolder.read(fetch(place, tmp_path / "new", {}).run) as again:
        assert entries(again) == {"k": 1}


async def test_the_older_of_two_heads_is_refused(run, place, tmp_path):
    older = writer(run, place)
    older.back_up()
    await run.journal.put("k", "old")
    with RunFolder.open(fetch(place, tmp_path / "new", {}).run) as new:
        with pytest.raises(Superseded, match="another head goes on with run run: process"):
            older.back_up()
        newer = writer(new, place)
        await new.journal.put("k", "new")
        newer.back_up()
        # Also after it was started again in its own folder.
        with pytest.raises(Superseded, match="another head"):
            writer(run, place).back_up()
        assert entries(new) == {"k": "new"}
    with RunFolder.read(fetch(place, tmp_path / "third", {}).run) as third:
        assert entries(third) == {"k": "new"}


async def test_a_head_that_slept_for_long_is_refused_though_its_number_is_free_again(run, place, tmp_path):
    older = writer(run, place)
    older.back_up()
    with RunFolder.open(fetch(place, tmp_path / "new", {}).run) as new:
        newer = writer(new, place)
        for number in range(6):
            await new.journal.put("k", number)
            newer.back_up()
            newer.tidy()
        address = Address(place, {})
        assert 2 not in numbers(address)
        await run.journal.put("k", "old")
        with pytest.raises(Superseded):
            older.back_up()
        assert 2 not in numbers(address)
        assert newest(address).head == newer.last.head


async def test_an_answer_that_was_lost_is_no_other_head(run, place, monkeypatch):
    backups = writer(run, place)
    real, lost = Address.create, []

    def losing(address: Address, name: str, data: bytes) -> None:
        real(address, name, data)
        if not lost:
            lost.append(name)
            raise ConnectionError("reset by peer")

    monkeypatch.setattr(Address, "create", losing)
    with pytest.raises(ConnectionError):
        backups.back_up()
    await run.journal.put("k", 1)
    assert backups.back_up().position == 1


async def test_a_run_of_the_same_name_is_not_overwritten(run, place, tmp_path):
    writer(run, place).back_up()
    with (
        RunFolder.create(tmp_path / "other", "run") as other,
        pytest.raises(RequestError, match=f"has a run of this name already.*etude resume {place}"),
    ):
        writer(other, place).back_up()


async def test_a_folder_that_is_older_than_its_backup_is_refused(run, place, tmp_path):
    import shutil

    backups = writer(run, place)
    backups.back_up()
    run.journal.close()
    shutil.copytree(run.path, tmp_path / "copy" / "run")
    with RunFolder(run.path, changes_journal(run.path), None) as again:
        await again.journal.put("k", 1)
        backups.back_up()
    with (
        RunFolder.open(tmp_path / "copy" / "run") as copy,
        pytest.raises(Superseded, match=f"is older than its backup 2.*etude resume {place}"),
    ):
        writer(copy, place).back_up()


def changes_journal(path: Path) -> Any:
    from etude.store.journal import Journal

    return Journal(path / "run.db")


async def test_an_address_without_a_run_says_where_runs_are(run, place, tmp_path):
    writer(run, place).back_up()
    parent = place.removesuffix("/run")
    with pytest.raises(RequestError, match=f"there is no run at {parent}; there are: {place}"):
        fetch(parent, tmp_path / "new", {})
    with pytest.raises(RequestError, match=f"there is no run at {parent}/rum; there are: {place}"):
        fetch(f"{parent}/rum", tmp_path / "new", {})
    with pytest.raises(RequestError, match="is there already; go on with it: etude resume"):
        fetch(place, tmp_path / "runs", {})
