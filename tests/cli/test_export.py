"""`etude export`: models that other programs load, and trajectories that they read."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from etude.rollout.collections import phase_name
from tests.cli.projects import change, etude, events, rows, succeed
from tests.support import one_quick
from tests.test_docs import ROOT, find_blocks, write_file


def test_a_model_is_a_folder_that_transformers_loads(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown = etude("export", "r", "--version", "last", "--out", "mine", "--json")
    told = json.loads(shown.stdout)
    assert told["version"] == 2
    assert "model.safetensors" in told["files"]
    # A user who may read one of them may read all.
    assert len({file.stat().st_mode for file in Path("mine").iterdir()}) == 1
    assert AutoTokenizer.from_pretrained("mine").chat_template
    assert AutoModelForCausalLM.from_pretrained("mine").config.vocab_size


def test_the_model_card_has_the_facts_of_the_run(trained):
    assert etude("export", "r", "--version", "v2", "--out", "mine").exit_code == 0
    card = (trained / "mine" / "README.md").read_text()
    _, front, body = card.split("---", 2)
    assert yaml.safe_load(front)["tags"] == ["etude", "grpo"]
    summary = json.loads((trained / "runs/r/summary.json").read_text())
    for end in ("before", "after"):
        assert f"{summary[end]['avg_reward']:.3f}" in body
    for text in ("95 % interval", "before training (v0) |", "version 2", "torch", "n=6 |"):
        assert text in body


def test_nothing_of_the_users_is_written_over(trained):
    (trained / "mine").mkdir()
    (trained / "mine" / "thesis.tex").write_text("years of work")
    assert etude("export", "r", "--version", "v1", "--out", "mine").exit_code == 2
    assert (trained / "mine" / "thesis.tex").read_text() == "years of work"
    assert etude("export", "r", "--version", "v1", "--out", "other").exit_code == 0
    assert etude("export", "r", "--version", "v2", "--out", "other").exit_code == 0


def test_trajectories_as_lines(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    told = json.loads(etude("export", "r", "--trajectories", "t.jsonl", "--json").stdout)
    rows = events((project / "t.jsonl").read_text())
    assert told["rows"] == len(rows)
    history = events((project / "runs/r/training_metrics.jsonl").read_text())
    assert len(rows) == sum(epoch["filtered_trajectories"] for epoch in history)
    row = rows[0]
    assert (row["run"], row["phase"], row["method"]) == ("r", "train/1", "grpo")
    assert [item["role"] for item in row["episode"]] == ["user", "assistant"]
    assert len(row["episode"][1]["token_ids"]) == len(row["episode"][1]["logprobs"])


@pytest.mark.parametrize("lora", one_quick(True, False))
def test_the_model_card_names_no_place_of_this_machine(local, tmp_path, lora):
    other = tmp_path.parent / "elsewhere.jsonl"
    other.write_text(rows(6, "v"))
    change(
        local / "config.yml",
        trainer_adapters__local__lora={"r": 2},
        finetuning__num_epochs=1,
        finetuning__run_configuration__validation_dataset=str(other),
        finetuning__output_dir=str(tmp_path / "here are the runs"),
    )
    succeed("train", "config.yml", "--name", "r")
    succeed("export", "here are the runs/r", "--out", "out", *(["--lora"] if lora else []))
    card = (local / "out" / "README.md").read_text()
    for place in (str(tmp_path), str(tmp_path.parent), str(Path.home()) + "/", "/tmp/"):
        assert place not in card
    assert "base model | base |" in card


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder, with the programs of the page on extending."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = ROOT / "docs" / "extending.md"
    for block in find_blocks(page):
        write_file(block, page, tmp_path)
    yield tmp_path
    for name in ("coin", "coin_backend", "extremes"):
        sys.modules.pop(name, None)


def test_trajectories_of_a_builder_that_collects_several_times_are_those_that_were_trained_on(own):
    assert etude("train", "builder.yml", "--name", "r").exit_code == 0
    jobs = events(etude("jobs", "r", "--json").stdout)[0]
    assert etude("export", "r", "--trajectories", "t.jsonl").exit_code == 0
    rows = events((own / "t.jsonl").read_text())
    phases = [phase_name("train", job["epoch"] - 1) for job in jobs for _ in range(job["trajectories"])]
    assert [row["phase"] for row in rows] == phases
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    # Another method's builder groups all of an epoch's collections.
    assert etude("export", "r", "--trajectories", "g.jsonl", "--method", "grpo").exit_code == 0
    groups = Counter((row["phase"], row["group"]) for row in events((own / "g.jsonl").read_text()))
    assert set(groups.values()) == {8}


def test_lora_weights_go_alone(trained: Path):
    succeed("export", "lora", "--version", "v1", "--lora", "--out", "out", "--license", "mit")
    files = {file.name for file in Path("out").iterdir()}
    assert {"adapter_model.safetensors", "README.md"} <= files
    assert "model.safetensors" not in files
    assert "/" not in json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"]
    card = Path("out/README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], front["license"]) == ("peft", "mit")
    assert "PeftModel.from_pretrained(base" in card


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lora", "--trajectories", "t.jsonl"], "--lora has no meaning with --trajectories"),
        (["--method", "dpo"], "--method goes with --trajectories FILE"),
    ],
)
def test_options_that_do_not_go_together(trained: Path, arguments: list[str], reason: str):
    shown = etude("export", "r", *arguments)
    assert shown.exit_code == 2
    assert reason in shown.stderr
