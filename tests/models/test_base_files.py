"""The files of a base model: recorded once, and known again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants

from etude.core.errors import RequestError
from etude.models.source import keep_base, require_base
from etude.store.journal import Journal

WEIGHTS = b"weights"
OLD, NEW = "1" * 40, "2" * 40


def in_folder(folder: Path) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    return str(folder)


def in_cache(cache: Path, commit: str, weights: str) -> str:
    """As the hub's cache: files in `blobs`, large ones by their digest, and links to them for each commit."""
    model = cache / "models--my--model"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (model / folder).mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    (model / "blobs" / "config").write_text("{}")
    (model / "blobs" / weights).write_bytes(b"not looked at")
    (model / "snapshots" / commit / "config.json").symlink_to(model / "blobs" / "config")
    (model / "snapshots" / commit / "model.safetensors").symlink_to(model / "blobs" / weights)
    return "my/model"


@pytest.fixture
def journal(tmp_path: Path):
    with Journal(tmp_path / "run.db") as journal:
        yield journal


async def test_the_files_of_a_folder_are_recorded_once_and_known_again(tmp_path: Path, journal: Journal):
    source = in_folder(tmp_path / "base")
    assert not require_base(journal, "policy", source)
    await keep_base(journal, "policy", source)
    recorded = journal.get("base/policy")
    assert recorded["commit"] is None and recorded["source"] == source
    assert recorded["files"]["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()
    (tmp_path / "base" / "notes.json").write_text("1")  # What is added is nobody's business.
    await keep_base(journal, "policy", source)
    assert journal.get("base/policy") == recorded and require_base(journal, "policy", source)


@pytest.mark.parametrize(
    ("harm", "clause"),
    [
        (
            lambda path: path.write_bytes(b"others"),
            r"model\.safetensors is changed \(its SHA-256 is \w{12}… and",
        ),
        (lambda path: path.unlink(), r"model\.safetensors is missing"),
    ],
)
async def test_a_changed_base_is_said_by_its_file(harm, clause: str, tmp_path: Path, journal: Journal):
    source = in_folder(tmp_path / "base")
    await keep_base(journal, "policy", source)
    harm(tmp_path / "base" / "model.safetensors")
    with pytest.raises(RequestError, match=rf"llms\.policy: .* not what this run began from: {clause}"):
        await keep_base(journal, "policy", source)


async def test_a_model_of_the_hub_is_known_by_the_names_of_its_blobs_and_its_commit(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    source = in_cache(tmp_path / "cache", OLD, "a" * 64)
    await keep_base(journal, "policy", source)
    recorded = journal.get("base/policy")
    assert recorded["commit"] == OLD and recorded["files"]["model.safetensors"] == "a" * 64
    in_cache(tmp_path / "cache", NEW, "a" * 64)  # A commit that changed none of them.
    await keep_base(journal, "policy", source)
    in_cache(tmp_path / "cache", NEW[::-1].replace("2", "3"), "b" * 64)
    with pytest.raises(RequestError, match=rf"its commit was {OLD}, and is {'3' * 40}\): model\.safetensors"):
        await keep_base(journal, "policy", source)
