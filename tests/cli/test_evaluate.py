"""`etude evaluate`: scores with their intervals, for any model and version."""

from __future__ import annotations

import json

import pytest

from tests.cli.projects import change, etude, finished


def evaluated(*arguments):
    shown = etude("evaluate", *arguments, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_the_held_out_examples_are_evaluated(project):
    result = evaluated("config.yml")
    assert result["examples"] == 6
    assert {item["id"] for item in result["items"]} == {f"v{n}" for n in range(6)}
    scores = result["scores"]["correct"]
    assert scores["low"] <= scores["mean"] <= scores["high"]
    assert (scores["n"], scores["scored"], scores["unscored"]) == (6, 6, 0)


def test_repeated_episodes_of_an_example_count_as_one_draw(project):
    result = evaluated("config.yml", "--repeat", "4")
    scores = result["scores"]["correct"]
    assert (scores["n"], scores["scored"]) == (6, 24)
    assert len(result["items"]) == 24


def test_results_are_kept(project):
    change(project / "config.yml", eval__general__output_dir=str(project / "results"))
    evaluated("config.yml", "--name", "e")
    for folder in (project / "runs" / "e", project / "results"):
        assert json.loads((folder / "evaluation.json").read_text())["scores"]["correct"]["n"] == 6
        assert len((folder / "items.jsonl").read_text().splitlines()) == 6


def test_a_version_of_a_run_is_evaluated(local):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    base, first, best = (evaluated("config.yml", "--model", f"r{wish}") for wish in (":base", ":v1", ""))
    assert (base["model"], first["model"]) == ("r:base", "r:v1")
    assert best["model"] in ("r:v1", "r:v2", "r:base")
    outputs = [[item["output"] for item in result["items"]] for result in (base, first)]
    assert outputs[0] != outputs[1]
    again = evaluated("config.yml", "--model", "runs/r:v1")
    assert [item["output"] for item in again["items"]] == outputs[1]


def test_an_exported_model_does_what_its_version_does(local):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert etude("export", "r", "--version", "v2", "--out", "mine").exit_code == 0
    exported = evaluated("config.yml", "--model", "mine")
    version = evaluated("config.yml", "--model", "r:v2")
    assert [item["output"] for item in exported["items"]] == [item["output"] for item in version["items"]]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("r:v9", "has no version v9"),
        ("r:worst", "'worst' is no version"),
        ("./nowhere", "the folder does not exist"),
    ],
)
def test_a_model_that_is_not_there(local, model, reason):
    assert etude("train", "config.yml", "--name", "r", "-o", "finetuning.num_epochs=1").exit_code == 0
    shown = etude("evaluate", "config.yml", "--model", model)
    assert shown.exit_code == 2
    assert reason in shown.stderr
    assert [path.name for path in (local / "runs").iterdir()] == ["r"]


def test_stored_episodes_are_scored_again_without_running_the_agent(project):
    evaluated("config.yml", "--name", "e")
    agent = (project / "agent.py").read_text()
    agent = agent.replace("return float(output == example.expected)", "return 0.25")
    agent = agent.replace("reply = await", "raise RuntimeError('the agent ran')\n    reply = await")
    (project / "agent.py").write_text(agent)
    shown = finished("evaluate", "--rescore", "e", "--json", folder=project)
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout)
    assert result["phase"] == "eval"
    assert result["scores"]["correct"]["mean"] == 0.25


def test_any_phase_of_a_training_run_can_be_scored_again(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert evaluated("--rescore", "r")["phase"] == "validation/2"
    result = evaluated("config.yml", "--rescore", "runs/r", "--phase", "train/2")
    assert (result["phase"], result["episodes"]) == ("train/2", 32)
    shown = etude("evaluate", "--rescore", "r", "--phase", "train/8")
    assert shown.exit_code == 2
    assert "there are: validation/2, validation/0, train/2, train/1" in shown.stderr
