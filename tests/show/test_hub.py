"""Exported folders on the hub: a stand-in of it speaks the real wire with the installed `huggingface_hub`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.core.errors import EtudeError, RequestError
from etude.show.hub import Repository
from tests.show.hub import READER, WRITER, Hub, Stored, log_in


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub where somebody is logged in who may write to `me/…`."""
    with Hub() as made:
        log_in(made.address, tmp_path, monkeypatch)
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As an export of a whole model is."""
    made = tmp_path / "v2"
    made.mkdir()
    (made / "README.md").write_text("---\nlicense: mit\n---\n\n# Sums\n")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (made / name).write_text("{}")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_folder_becomes_a_private_repository(hub: Hub, folder: Path):
    repository = Repository("me/sums")
    repository.require()
    assert repository.send(folder, "sums:v2") == f"{hub.address}/me/sums"
    stored = hub.repositories["me/sums"]
    assert stored.private and stored.commits == ["sums:v2"] and stored.files == contents(folder)


def test_a_hub_that_is_away_loses_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log_in("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(EtudeError, match=rf"away, or broke off .*{folder}, and the same command goes on"):
        Repository("me/sums").send(folder, "first")


def test_other_weights_take_the_place_of_the_old_ones(hub: Hub, folder: Path):
    """Shards or LoRA weights of an earlier export would be loaded beside them. The user's own files stay."""
    own = {"LICENSE": b"mine", "model-00001-of-00002.safetensors": b"old", "adapter_config.json": b"{}"}
    hub.repositories["me/sums"] = Stored(True, own)
    Repository("me/sums").send(folder, "new")
    assert hub.repositories["me/sums"].files == {"LICENSE": b"mine", **contents(folder)}


@pytest.mark.parametrize("name", ["sums", "me/my sums", "me/a/b", "me/-sums", "me/a--b"])
def test_names_that_the_hub_does_not_take(name: str):
    with pytest.raises(RequestError, match=r"--push .*rite user/name"):
        Repository(name)


@pytest.mark.parametrize(("token", "name"), [(READER, "me/sums"), (WRITER, "others/sums")])
def test_a_token_that_may_not_write(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str, name: str
):
    monkeypatch.setenv("HF_TOKEN", token)
    repository = Repository(name)
    repository.require()
    with pytest.raises(EtudeError, match=rf"may not write to {name} .*a repository of your own") as refused:
        repository.send(folder, "mine")
    assert token not in str(refused.value)
    assert str(folder) in str(refused.value)


def test_nothing_is_shown_to_everybody_by_mistake(hub: Hub):
    hub.repositories["me/sums"] = Stored(private=False)
    with pytest.raises(RequestError, match=r"everybody would see the model\. Add --public"):
        Repository("me/sums").require()
    Repository("me/sums", public=True).require()
