"""`etude export`: models that other programs load."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from etude.core.errors import RequestError
from etude.verbs import load_run
from tests.cli.projects import change, etude, rows, succeed
from tests.support import read_summary


def test_a_model_is_a_folder_that_transformers_loads_with_the_facts_of_the_run(after_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    told = json.loads(succeed("export", "r", "--version", "last", "--out", "mine", "--json").stdout)
    assert told["version"] == 2
    assert "model.safetensors" in told["files"]
    # A user who may read one of them may read all.
    assert len({file.stat().st_mode for file in Path("mine").iterdir()}) == 1
    assert AutoTokenizer.from_pretrained("mine").chat_template
    assert AutoModelForCausalLM.from_pretrained("mine").config.vocab_size
    _, front, body = Path("mine/README.md").read_text().split("---", 2)
    assert yaml.safe_load(front)["tags"] == ["etude", "grpo"]
    summary = read_summary(after_run / "runs/r")
    for end in ("before", "after"):
        assert f"{summary[end]['avg_reward']:.3f}" in body
    for text in ("95 % interval", "before training (v0)", "version 2", "n=6"):
        assert text in body


def test_nothing_of_the_users_is_written_over(after_run):
    (after_run / "mine").mkdir()
    (after_run / "mine" / "thesis.tex").write_text("years of work")
    assert etude("export", "r", "--version", "v1", "--out", "mine").exit_code == 2
    assert (after_run / "mine" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(RequestError, match="choose another folder"):
        load_run("runs/r").model.export(after_run / "mine" / "thesis.tex")
    assert etude("export", "r", "--version", "v1", "--out", "other").exit_code == 0
    assert etude("export", "r", "--version", "v2", "--out", "other").exit_code == 0
    (after_run / "other" / "model.gguf").write_text("made of it")
    assert etude("export", "r", "--version", "v1", "--out", "other").exit_code == 2
    assert (after_run / "other" / "model.gguf").read_text() == "made of it"
    shutil.rmtree(after_run / "runs/r/checkpoints/v1")
    refused = etude("export", "r", "--version", "v1", "--lora")
    assert "r:v1 has no LoRA weights" in refused.output and "trained again" not in refused.output


def test_lora_weights_go_alone_and_no_model_card_names_a_place_of_this_machine(local, tmp_path):
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
    for out, options in (("whole", []), ("lora", ["--lora"])):
        succeed("export", "here are the runs/r", "--out", out, *options)
        card = (local / out / "README.md").read_text()
        for place in (str(tmp_path), str(tmp_path.parent), str(Path.home()) + "/", "/tmp/"):
            assert place not in card
        assert "The base model is base." in card
    files = {file.name for file in Path("lora").iterdir()}
    assert {"adapter_model.safetensors", "README.md"} <= files
    assert "model.safetensors" not in files
    assert "/" not in json.loads(Path("lora/adapter_config.json").read_text())["base_model_name_or_path"]
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
