"""Files and folders of a run are its user's alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.store.files import open_draft, open_private, private_folder, write_atomically
from etude.store.run_folder import RunFolder


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_run_folder_and_its_journal_with_all_that_sqlite_writes_beside_it(tmp_path: Path):
    with RunFolder.create(tmp_path / "runs", "r", config="a: 1\n") as run:
        await run.journal.put("key", "value")
        assert run.checkpoints.is_dir()
        names = {path.name for path in run.path.iterdir()}
        assert {"run.db", "run.db-wal", "run.db-shm", "lock", "config.yml"} <= names
        for path in (tmp_path / "runs", run.path, *run.path.rglob("*")):
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_was_there_becomes_private_with_the_run(tmp_path: Path):
    (tmp_path / "r").mkdir()
    with RunFolder.create(tmp_path, "r"):
        assert mode(tmp_path / "r") == 0o700


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


def test_folders_that_are_there_stay_as_they_are(tmp_path: Path):
    (tmp_path / "there").mkdir()
    private_folder(tmp_path / "there" / "a" / "b")
    assert [mode(tmp_path / "there" / name) for name in ("", "a", "a/b")] == [0o777, 0o700, 0o700]
    with open_private(tmp_path / "file", "a") as file:
        file.write("x")
    assert mode(tmp_path / "file") == 0o600
