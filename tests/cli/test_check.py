"""`etude check` and `etude doctor`: what is wrong, and what a run would take."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.projects import change, etude, rows, succeed


def checked(*arguments):
    shown = etude("check", *arguments, "--json")
    return json.loads(shown.stdout), shown.exit_code


def details(report, status):
    return {
        finding["what"]: finding["detail"] for finding in report["findings"] if finding["status"] == status
    }


def test_a_config_that_would_run(local):
    report, code = checked("config.yml")
    assert code == 0 and report["ready"]
    found = details(report, "ok")
    assert found["workflow"].startswith("play (")
    assert found["examples"] == "8, inputs: question; 8 with an answer"
    assert found["evaluator varied"].endswith("the reward")
    assert re.search(r"0\.12\d M parameters, cpu, float32, context 256", found["model policy"])
    assert found["training"] == "grpo data (grpo), trained by local"
    assert not (local / "runs").exists()


def test_episodes_and_calls_are_counted(project):
    change(project / "config.yml", finetuning__num_epochs=7)
    estimate = checked("config.yml")[0]["estimate"]
    # 7 epochs with 4 episodes for each of 8 examples; validations before, after 5 and at the end.
    assert estimate["training_episodes"] == 7 * 8 * 4
    assert estimate["validation_episodes"] == 3 * 6
    assert (estimate["measured_on"], estimate["tokens"]) == (0, None)


MAZE = """
from etude import WorkflowConfig, register_workflow


class MazeConfig(WorkflowConfig, name="maze"):
    def missing(self):
        return ["walls are not there; pip install walls"]


@register_workflow(config_type=MazeConfig)
async def maze(config, builder):
    raise AssertionError("it is not built where something is missing")
    yield
"""


def test_all_that_an_environment_lacks_is_said_before_anything_is_built(project):
    (project / "maze.py").write_text(MAZE)
    change(project / "config.yml", workflow="maze:maze")
    report, code = checked("config.yml")
    assert code == 2
    assert details(report, "error") == {"needs": "walls are not there; pip install walls"}


def test_a_prompt_names_inputs_that_the_examples_have(project):
    change(project / "config.yml", workflow={"_type": "agent", "prompt": "{question} {qestion}"})
    report, code = checked("config.yml")
    assert code == 2
    told = "workflow.prompt: example 't0' has no input '{qestion}'; inputs: question"
    assert details(report, "error") == {"workflow": told}


def test_a_storage_is_tried(project):
    shown = succeed("check", "config.yml", "-o", f"storage=file://{project}/storage")
    assert "an object was written, read back and deleted" in " ".join(shown.stdout.split())
    assert list((project / "storage").iterdir()) == []
    shown = etude("check", "config.yml", "-o", f"storage=file://{project}/train.jsonl")
    assert shown.exit_code != 0
    assert "is there such a bucket or folder" in " ".join(shown.stdout.split())


def test_all_that_is_wrong_is_found_in_one_go(local):
    change(
        local / "config.yml",
        llms__policy__model="./nowhere",
        eval__general__dataset="trian.jsonl",
        trajectory_builders__grpo__num_generations=1,
        finetuning__warm_up={"transcripts": "train.jsonl", "steps": 1},
    )
    report, code = checked("config.yml")
    assert code == 2 and not report["ready"] and report["estimate"] is None
    wrong = details(report, "error")
    assert set(wrong) == {"examples", "model policy", "warm-up", "training"}
    assert "train.jsonl:1: messages: Field required" in wrong["warm-up"]
    assert "the folder does not exist" in wrong["model policy"]
    assert "did you mean" in wrong["examples"]
    assert "num_generations: 1" in wrong["training"]
    shown = etude("check", "config.yml")
    assert shown.exit_code == 2
    assert "✗ examples" in shown.stdout


def test_held_out_examples_must_be_held_out(project):
    (project / "validation.jsonl").write_text(rows(60, "t"))
    warnings = details(checked("config.yml")[0], "warning")
    assert "8 of 60 examples are also trained on" in warnings["validation"]


def test_the_doctor_looks_at_the_installation(project):
    report = json.loads(etude("doctor", "--json").stdout)
    found = {finding["what"] for finding in report["findings"]}
    assert {"etude", "python", "extra 'local'", "extra 'data'", "torch", "disk"} <= found
    shown = etude("doctor")
    assert shown.stdout.rstrip().splitlines()[-1].startswith("next: ")


def test_an_option_that_the_model_cannot_have_is_named(local):
    change(local / "config.yml", llms__policy__chat_template_kwargs={"enable_thinking": True})
    report, code = checked("config.yml")
    assert code == 2 and not report["ready"]
    assert "has no option 'enable_thinking'" in details(report, "error")["model policy"]


@pytest.mark.parametrize("name", ["judge", "<workflw>"])
def test_a_target_function_that_no_call_has_is_found_by_a_few_episodes(project, name):
    change(project / "config.yml", finetuning__target_functions=[name])
    report, code = checked("config.yml", "--play", 4)
    assert code == 2 and report["estimate"] is None
    assert f"({name}); functions that called it: '<workflow>'" in details(report, "error")["playing"]
