"""Exported folders on the hub: a stand-in of it speaks the real wire with the installed `huggingface_hub`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import snapshot_download

from etude.core.errors import EtudeError, RequestError
from etude.show.hub import Repository
from tests.show.hub import READER, WRITER, Hub, Stored, log_in, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub where somebody is logged in who may write to `me/…`."""
    with running_hub() as made:
        log_in(made, tmp_path, monkeypatch)
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As an export of a whole model is, with weights that fill several chunks."""
    made = tmp_path / "v2"
    made.mkdir()
    (made / "README.md").write_text("---\nlicense: mit\n---\n\n# Sums\n")
    (made / "config.json").write_text("{}")
    (made / "tokenizer_config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(random.Random(0).randbytes(300_000) + bytes(300_000))
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_what_is_downloaded_again_is_what_was_sent(hub: Hub, folder: Path, tmp_path: Path):
    repository = Repository("me/sums")
    repository.require()
    assert repository.send(folder, "sums:v2") == f"{hub.url}/me/sums"
    stored = hub.repositories["me/sums"]
    assert stored.private
    assert stored.commits == ["sums:v2"]
    assert any("/lfs/" in request for request in hub.requests)
    back = snapshot_download("me/sums", local_dir=tmp_path / "back")
    assert contents(Path(back)) == contents(folder)


def test_the_same_again_sends_nothing(hub: Hub, folder: Path):
    Repository("me/sums").send(folder, "first")
    received = hub.received
    assert received > 300_000
    Repository("me/sums").require()
    Repository("me/sums").send(folder, "second")
    assert hub.repositories["me/sums"].commits == ["first"]
    assert hub.received == received


def test_an_upload_that_was_cut_off_goes_on(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The weights were there, and the commit was not: nothing is half there, and they are not sent again."""
    # The client would wait between its tries for most of half a minute.
    hasty = ModuleType("time")
    vars(hasty).update(vars(time), sleep=lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)
    hub.failing.add("POST /api/models/me/sums/commit")
    with pytest.raises(EtudeError, match=r"away, or broke off .* the same command goes on"):
        Repository("me/sums").send(folder, "first")
    assert hub.repositories["me/sums"].files == {}
    received = hub.received
    hub.failing.clear()
    Repository("me/sums").send(folder, "second")
    assert hub.repositories["me/sums"].files == contents(folder)
    assert hub.received == received


def test_other_weights_take_the_place_of_the_old_ones(hub: Hub, folder: Path, tmp_path: Path):
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
