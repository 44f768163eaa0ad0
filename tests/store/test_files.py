"""Files that appear in full or not at all, are on the disk when they count, and are their user's alone."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.core.errors import StoreError
from etude.store.files import (
    damage_in,
    delete_left_over,
    note_sum,
    open_draft,
    open_private,
    private_folder,
    write_atomically,
)
from etude.store.run_folder import RunFolder

HERE = f"{threading.get_ident()}.{os.getpid()}"


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Syncs and renames, by the names of their files, in order."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_sync(file: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{file}').readlink().name}")
        fsync(file)

    def noted_replace(path: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    return done


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_is_then(
    tmp_path: Path, operations: list[str]
) -> None:
    write_atomically(tmp_path / "one.txt", "text")
    assert operations == [f"sync .one.txt.{HERE}.part", "rename to one.txt", f"sync {tmp_path.name}"]


def test_so_is_all_that_is_in_a_folder(tmp_path: Path, operations: list[str]) -> None:
    with open_draft(tmp_path / "v1") as draft:
        (draft / "inside").mkdir(parents=True)
        (draft / "a").write_text("a")
        (draft / "inside" / "b").write_text("b")
    name = f"sync .v1.{HERE}.part"
    assert sorted(operations[:2]) == ["sync b", "sync inside"]
    places = [f"sync {tmp_path.name}", f"sync {tmp_path.parent.name}"]
    assert operations[2:] == ["sync a", name, "rename to v1", *places]


def test_what_fails_leaves_what_was_there_and_no_draft(tmp_path: Path) -> None:
    write_atomically(tmp_path / "one.txt", "before")
    with pytest.raises(StoreError, match=r"one\.txt .*: no room"), open_draft(tmp_path / "one.txt") as draft:
        draft.write_text("half")
        raise OSError("no room")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one.txt", "before")]


def test_drafts_of_killed_processes_are_deleted_where_their_folder_is_opened(tmp_path: Path) -> None:
    """A process in a container may have the number of the one that was killed."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (tmp_path / "inside").mkdir()
    for number in (gone.pid, os.getpid(), os.getppid()):
        (tmp_path / "inside" / f".run.db.{number}.part").write_text("half")
        (tmp_path / "inside" / f".run.db.{number}.part-wal").write_text("its log")
        (tmp_path / f".v1.{number}.part").mkdir()
    delete_left_over(tmp_path)
    living = [f".run.db.{os.getppid()}.part", f".run.db.{os.getppid()}.part-wal", f".v1.{os.getppid()}.part"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["inside", *living])


def test_threads_that_note_sums_in_one_folder_lose_none(tmp_path: Path):
    files = [tmp_path / f"part-{number}" for number in range(64)]
    for file in files:
        file.write_text(file.name, encoding="utf-8")
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(note_sum, files)] == [None] * len(files)
    assert damage_in(tmp_path) == []
    files[0].write_text("changed", encoding="utf-8")
    assert len(damage_in(tmp_path)) == 1 and damage_in(tmp_path, without=files[0].name) == []


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
async def test_a_run_folder_and_its_journal_with_all_that_sqlite_writes_beside_it(tmp_path: Path):
    with RunFolder.create(tmp_path / "runs", "r", config="a: 1\n") as run:
        await run.journal.put("key", "value")
        assert run.checkpoints.is_dir()
        names = {path.name for path in run.path.iterdir()}
        assert {"run.db", "run.db-wal", "run.db-shm", "lock", "config.yml"} <= names
        for path in (tmp_path / "runs", run.path, *run.path.rglob("*")):
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.usefixtures("umask")
def test_a_folder_that_was_there_becomes_private_with_the_run(tmp_path: Path):
    (tmp_path / "r").mkdir()
    with RunFolder.create(tmp_path, "r"):
        assert mode(tmp_path / "r") == 0o700


@pytest.mark.usefixtures("umask")
def test_drafts_are_private_with_what_others_wrote_in_them(tmp_path: Path):
    with open_draft(tmp_path / "made") as draft:
        (draft / "inner").mkdir(parents=True)
        (draft / "inner" / "file").write_text("x")
    assert [mode(tmp_path / "made" / name) for name in ("", "inner", "inner/file")] == [0o700, 0o700, 0o600]
    with open_draft(tmp_path / "given", private=False) as draft:
        draft.write_text("x")
    assert mode(tmp_path / "given") == 0o666


def test_texts_are_masked_unless_they_must_be_exact(tmp_path: Path):
    text = "postgres://me:pw@host/db"
    write_atomically(tmp_path / "report", text)
    write_atomically(tmp_path / "rows", text, exact=True)
    assert "pw" not in (tmp_path / "report").read_text()
    assert (tmp_path / "rows").read_text() == text


@pytest.mark.usefixtures("umask")
def test_folders_that_are_there_stay_as_they_are(tmp_path: Path):
    (tmp_path / "there").mkdir()
    private_folder(tmp_path / "there" / "a" / "b")
    assert [mode(tmp_path / "there" / name) for name in ("", "a", "a/b")] == [0o777, 0o700, 0o700]
    with open_private(tmp_path / "file", "a") as file:
        file.write("x")
    assert mode(tmp_path / "file") == 0o600
