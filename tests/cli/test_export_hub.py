"""`etude export --push`: a run's model on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.projects import change, etude
from tests.export.hub import Hub, log_in, running_hub


@pytest.fixture
def trained(local: Path) -> Path:
    change(local / "config.yml", trainer_adapters__local__lora={"r": 2}, finetuning__num_epochs=1)
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    return local


@pytest.fixture
def hub(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as made:
        log_in(made, trained, monkeypatch)
        yield made


def front_of(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---")[1]))


def test_the_model_that_transformers_loads_from_the_hub_is_the_one_that_was_trained(hub: Hub):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown = etude("export", "r", "--version", "v1", "--push", "me/sums", "--json")
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert told["hub"]["address"] == f"{hub.url}/me/sums"
    assert told["hub"]["visibility"] == "private"
    assert {*hub.repositories["me/sums"].branches["main"]} == {*told["files"]}
    assert hub.repositories["me/sums"].commits == ["r:v1"]
    cache = "cache"
    back = AutoModelForCausalLM.from_pretrained("me/sums", cache_dir=cache).state_dict()
    kept = AutoModelForCausalLM.from_pretrained(told["folder"]).state_dict()
    assert all(torch.equal(back[name], kept[name]) for name in kept)
    places = ("me/sums", told["folder"])
    tokenizers = [AutoTokenizer.from_pretrained(place, cache_dir=cache) for place in places]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_lora_weights_go_alone(hub: Hub):
    shown = etude("export", "r", "--version", "v1", "--lora", "--push", "me/lora", "--public")
    assert shown.exit_code == 0, shown.stderr
    stored = hub.repositories["me/lora"]
    assert not stored.private
    assert {"adapter_model.safetensors", "README.md"} <= {*stored.branches["main"]}
    card = stored.branches["main"]["README.md"].decode()
    assert front_of(card)["library_name"] == "peft"
    assert "PeftModel.from_pretrained(base" in card


def test_nothing_is_written_before_the_hub_has_been_looked_at(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    shown = etude("export", "r", "--version", "v1", "--push", "me/sums")
    assert shown.exit_code == 2
    assert "`hf auth login`" in shown.stderr
    assert not Path("runs/r/export").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--push", "sums"], "write user/name"),
        (["--public"], "--public has no meaning with a folder of this machine: add --push USER/NAME"),
        (["--push", "me/sums", "--trajectories", "t.jsonl"], "--push has no meaning with --trajectories"),
        (["--outtype", "f16"], "add --format gguf"),
        (["--format", "gguf", "--lora"], "--lora has no meaning with --format gguf"),
        (["--format", "rows"], "--format goes with --trajectories FILE"),
        (["--trajectories", "t.jsonl", "--format", "gguf"], "--format gguf is of a model"),
    ],
)
def test_options_that_do_not_go_together(project: Path, arguments: list[str], reason: str):
    change(project / "config.yml", finetuning__num_epochs=1)
    assert etude("train", "config.yml", "--name", "q").exit_code == 0
    shown = etude("export", "q", *arguments)
    assert shown.exit_code == 2
    assert reason in shown.stderr
