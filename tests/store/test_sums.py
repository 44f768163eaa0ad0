"""The digests of a folder's files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.store.sums import damage_in, note_sum


def test_threads_that_note_sums_in_one_folder_lose_none(tmp_path: Path):
    files = [tmp_path / f"part-{number}" for number in range(64)]
    for file in files:
        file.write_text(file.name, encoding="utf-8")
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(note_sum, files)] == [None] * len(files)
    assert damage_in(tmp_path) == []
