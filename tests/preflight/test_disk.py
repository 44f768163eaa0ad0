"""`etude doctor` on the disk of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.preflight.disk import examine_disk, file_system
from etude.preflight.finding import Finding, Findings


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk of the tests is just now."""
    monkeypatch.setattr("etude.preflight.disk._SLOW_SYNC_SECONDS", 60.0)


def examined(folder: Path) -> dict[str, Finding]:
    findings = Findings()
    examine_disk(folder, findings)
    return {finding.what.partition(" (")[0]: finding for finding in findings.items}


def test_a_good_disk_is_tried_and_left_as_it_was(tmp_path: Path):
    found = examined(tmp_path / "runs")
    assert {name: finding.status for name, finding in found.items()} == {"disk": "ok", "file system": "ok"}
    assert "is on the disk in" in found["file system"].detail
    assert list(tmp_path.iterdir()) == []


def test_where_locks_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etude.store.lock._try_lock", lambda file: True)
    found = examined(tmp_path)["file system"]
    assert found.status == "error" and "locks of files mean nothing" in found.detail
    assert "--output-dir" in found.detail


def test_where_permissions_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etude.store.files.FILE_MODE", 0o644)
    assert "everybody may read" in examined(tmp_path)["file system"].detail


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etude.preflight.disk._SLOW_SYNC_SECONDS", 0.0)
    found = examined(tmp_path)["file system"]
    assert found.status == "warning" and "every batch of a journal's entries waits" in found.detail


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etude.preflight.machine.free_disk", lambda folder: 1_000_000)
    found = examined(tmp_path)["disk"]
    assert found.status == "warning" and "only 1.0 MB free" in found.detail


def test_the_file_system_of_a_folder():
    assert file_system(Path("/proc")) in ("proc", None)
