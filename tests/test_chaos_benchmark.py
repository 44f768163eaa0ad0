"""The disk that `benchmarks/chaos.py` takes the power from, and how it finds what is lost."""

from __future__ import annotations

import importlib
import json
import random
import sqlite3
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etude.store.database import Writer
from etude.store.journal import Journal

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("chaos_disk")


@pytest.fixture
def acknowledged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("chaos_acknowledged")


class Written:
    """A disk after the calls of a program, given as strace writes them, without its hexadecimal digits."""

    def __init__(self, disks: ModuleType, folder: Path) -> None:
        self.traces = importlib.import_module("chaos_trace")
        self.folder, self.disk = folder, disks.Disk(folder / "there", "runs")

    def follow(self, *lines: str) -> None:
        for line in lines:
            text = "".join(
                "".join(f"\\x{byte:02x}" for byte in part.replace("/", f"{self.folder}/there/", 1).encode())
                if index % 2
                else part
                for index, part in enumerate(line.split("'"))
            )
            call = self.traces._call(0.0, text)
            assert call is not None, text
            self.disk.follow(call)

    def after(self, loss: str, seed: int = 0) -> dict[str, str]:
        """The files and their contents when the power has gone."""
        place = self.folder / f"{loss}-{seed}-{random.random()}"
        place.mkdir()
        self.disk.write_to(place, loss, random.Random(seed))
        return {
            str(path.relative_to(place / "runs")): path.read_text()
            for path in place.rglob("*")
            if path.is_file()
        }


OPENED = "openat(AT_FDCWD<'/'>, \"'/runs/{name}'\", O_WRONLY|O_CREAT, 0600) = 3<'/runs/{name}'>"
WRITE = "write(3<'/runs/{name}'>, \"'{text}'\", {size}) = {size}"
SYNC = "fsync(3<'/runs/{name}'>) = 0"


def made(name: str, text: str) -> list[str]:
    lines = [OPENED, WRITE, SYNC]
    return [line.format(name=name, text=text, size=len(text)) for line in lines]


@pytest.fixture
def written(disks: ModuleType, tmp_path: Path) -> Written:
    written = Written(disks, tmp_path)
    written.follow("mkdir(\"'/runs'\", 0700) = 0", "fsync(4<'/'>) = 0")
    return written


def test_a_name_is_kept_once_its_folder_was_synced(written: Written):
    written.follow(*made("new", "text"))
    assert written.after("all") == {}
    assert written.after("content") == {"new": "text"}
    written.follow("fsync(4<'/runs'>) = 0")
    assert written.after("all") == {"new": "text"}


def test_content_is_kept_once_its_file_was_synced(written: Written):
    written.follow(*made("file", "old"), "fsync(4<'/runs'>) = 0")
    written.follow("pwrite64(3<'/runs/file'>, \"'new'\", 3, 0) = 3")
    assert [written.after(loss)["file"] for loss in ("all", "content", "names")] == ["old", "old", "new"]
    assert {written.after("some", seed)["file"] for seed in range(20)} == {"old", "new"}


def test_a_file_in_the_place_of_another_is_the_old_one_until_the_folder_was_synced(written: Written):
    written.follow(*made("file", "old"), *made("draft", "new"), "fsync(4<'/runs'>) = 0")
    written.follow("rename(\"'/runs/draft'\", \"'/runs/file'\") = 0")
    assert written.after("all") == {"file": "old", "draft": "new"}
    assert written.after("content") == {"file": "new"}
    written.follow("fsync(4<'/runs'>) = 0")
    assert written.after("all") == {"file": "new"}


def test_half_of_what_was_not_synced_may_be_there(written: Written):
    written.follow(*made("file", "a" * 2048), "fsync(4<'/runs'>) = 0")
    written.follow(f"pwrite64(3<'/runs/file'>, \"'{'b' * 2048}'\", 2048, 0) = 2048")
    found = {written.after("some", seed)["file"] for seed in range(20)}
    assert any("a" in text and "b" in text for text in found)
    assert all(text[at] == text[at + 511] for text in found for at in range(0, 2048, 512))


def noted(kept: dict[str, Any], gone: list[list[str]], done: bool) -> str:
    checksums = {key: zlib.crc32(json.dumps(value).encode()) for key, value in kept.items()}
    return f"{json.dumps({'kept': checksums, 'gone': gone})}\n" + '"done"\n' * done


async def test_what_was_acknowledged_and_is_not_there_is_lost(acknowledged: ModuleType, tmp_path: Path):
    with Journal(tmp_path / "run.db") as journal:
        await journal.put("a", 1)
        await journal.put("c", 3)
    log = noted({"a": 1}, [], True) + noted({"b": 2, "c": 2}, [], True) + noted({"d": 4}, [], False)
    lost = acknowledged.lost_of(log.encode(), tmp_path / "run.db")
    assert sorted(lost) == ["b is not there", "c is another"]
    later = log + noted({"c": 3}, [["b", "c"]], False)
    assert acknowledged.lost_of(later.encode(), tmp_path / "run.db") == []


async def test_the_log_of_a_journal_has_all_that_it_stores(
    acknowledged: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Writer, "_write", Writer._write)  # To have it back after this test.
    log, path = tmp_path / "log", tmp_path / "run.db"
    acknowledged.log_to(log)
    with Journal(path) as journal:
        journal.put_soon("sum", lambda: {"number": 1})
        await journal.put("a", [1])
        await journal.delete("a")
        await journal.put("b", 2)
    assert acknowledged.lost_entries(log, path) == []
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM steps WHERE key = 'b'")
    assert acknowledged.lost_entries(log, path) == ["b is not there"]
