"""`etude check` and `etude doctor`: what is wrong, and what a run would take."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import resolved_yaml
from tests.cli.projects import change, etude, fail, rows, succeed
from tests.loop.test_targets import play
from tests.models.tiny_models import fresh_policy


def check(*arguments):
    shown = etude("check", *arguments, "--json")
    return json.loads(shown.stdout), shown.exit_code


def details(report, status):
    return {
        finding["what"]: finding["detail"] for finding in report["findings"] if finding["status"] == status
    }


def test_a_config_that_would_run(local):
    report, code = check("config.yml")
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
    estimate = check("config.yml")[0]["estimate"]
    # 7 epochs with 4 episodes for each of 8 examples; validations before, after 5 and at the end.
    assert estimate["training_episodes"] == 7 * 8 * 4
    assert estimate["validation_episodes"] == 3 * 6
    assert (estimate["measured_on"], estimate["tokens"]) == (0, None)


MAZE = """
from etude import WorkflowConfig, register_workflow


class MazeConfig(WorkflowConfig, name="maze"):
    def missing(self):
        return ["no walls; pip install walls"]


@register_workflow(config_type=MazeConfig)
async def maze(config, builder):
    raise AssertionError("it is not built where something is missing")
    yield
"""


@pytest.mark.parametrize(
    ("workflow", "what", "told"),
    [
        ("maze:maze", "needs", "no walls; pip install walls"),
        (
            {"_type": "agent", "prompt": "{question} {qestion}"},
            "workflow",
            "workflow.prompt: example 't0' has no input '{qestion}'; inputs: question",
        ),
    ],
)
def test_what_a_workflow_lacks_is_said_before_anything_is_built(project, workflow, what, told):
    (project / "maze.py").write_text(MAZE)
    change(project / "config.yml", workflow=workflow)
    report, code = check("config.yml")
    assert code == 2
    assert details(report, "error") == {what: told}


def test_a_storage_is_tried(project):
    shown = succeed("check", "config.yml", "-o", f"storage=file://{project}/storage")
    assert "written, read back" in " ".join(shown.stdout.split())
    assert list((project / "storage").iterdir()) == []
    shown = etude("check", "config.yml", "-o", f"storage=file://{project}/train.jsonl")
    assert shown.exit_code != 0
    assert "bucket or folder" in " ".join(shown.stdout.split())


def test_all_that_is_wrong_is_found_in_one_go(local):
    change(
        local / "config.yml",
        llms__policy__model="./nowhere",
        eval__general__dataset="trian.jsonl",
        trajectory_builders__grpo__num_generations=1,
        finetuning__warm_up={"transcripts": "train.jsonl", "steps": 1},
        finetuning__output_dir="/proc/runs",
    )
    report, code = check("config.yml")
    assert code == 2 and not report["ready"] and report["estimate"] is None
    wrong = details(report, "error")
    assert set(wrong) == {"output_dir", "examples", "model policy", "warm-up", "training"}
    assert "no file can be written in /proc (No such" in wrong["output_dir"]
    assert "train.jsonl:1: messages: Field required" in wrong["warm-up"]
    assert "./nowhere': the folder" in wrong["model policy"]
    assert "did you mean" in wrong["examples"]
    assert "num_generations: 1" in wrong["training"]
    shown = fail("check", "config.yml")
    assert "✗ examples" in shown.stdout


def test_a_context_that_holds_no_answer_is_found(local):
    fresh_policy(max_context=4).export(local / "small")
    change(local / "config.yml", llms__policy__model="small")
    assert "its context is 4 " in details(check("config.yml")[0], "error")["model policy"]


def test_held_out_examples_must_be_held_out(project):
    (project / "validation.jsonl").write_text(rows(60, "t"))
    warnings = details(check("config.yml")[0], "warning")
    assert "8 of 60 examples" in warnings["validation"]


def test_the_doctor_looks_at_the_installation(project):
    report = json.loads(etude("doctor", "--json").stdout)
    found = {finding["what"] for finding in report["findings"]}
    assert {"etude", "python", "extra 'local'", "extra 'data'", "torch", "disk"} <= found
    assert etude("doctor").stdout.rstrip().splitlines()[-1].startswith("next: ")


def test_an_option_that_the_model_cannot_have_is_named(local):
    change(local / "config.yml", llms__policy__chat_template_kwargs={"enable_thinking": True})
    report, code = check("config.yml")
    assert code == 2 and not report["ready"]
    assert "has no option 'enable_thinking'" in details(report, "error")["model policy"]


@pytest.mark.parametrize("name", ["judge", "<workflw>"])
def test_a_target_function_that_no_call_has_is_found_by_a_few_episodes(project, name):
    change(project / "config.yml", finetuning__target_functions=[name])
    report, code = check("config.yml", "--play", 4)
    assert code == 2 and report["estimate"] is None
    assert re.search(rf"\({name}\); .*: '<workflow>'", details(report, "error")["playing"])


# Names of agents in a protocol


def write_protocol(**changes: Any) -> str:
    """The config of two models that play `adp` and are both trained, with keys changed."""
    validation = {"run_configuration": {"validation_dataset": "tests.loop.test_targets:claims"}}
    builder = {"_type": "grpo", "num_generations": 4, "credit": "agent"}
    path = Path("config.yml")
    path.write_text(resolved_yaml(play(builder, finetuning=validation)))
    change(path, **changes)
    return path.read_text()


WRONG = [
    ("eval__evaluators__verified__agent", "verifer", "agent: verifer", "eval.evaluators.verified.agent"),
    (
        "trajectory_builders__mine",
        {"_type": "malt", "num_responses": {"prover": 2, "verifer": 3}},
        "verifer: 3",
        "trajectory_builders.mine.num_responses.verifer",
    ),
    ("workflow__widths", {"verifer": [2, 1]}, "verifer:", "workflow.widths.verifer"),
    ("workflow__policies__verifer", "verifier", "verifer:", "workflow.policies.verifer"),
    ("finetuning__target_functions", ["*", "verifer"], "- verifer", "finetuning.target_functions.1"),
]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("key", "value", "words", "path"), WRONG, ids=[path for *_, path in WRONG])
def test_an_unknown_agent_is_found_before_anything_is_sampled(key, value, words, path):
    lines = write_protocol(**{key: value}).splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if words in text]
    shown = fail("check", "config.yml")
    output = " ".join((shown.stderr + shown.stdout).split())
    assert f"config.yml:{line}:" in output
    assert re.search(rf"{re.escape(path)}: .*no agent 'verifer'; .*'verifier'\?", output)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("workflow__policies", dict.fromkeys(("prover", "verifier"), "verifier"), "prover: no agent.*, so "),
        ("trajectory_builders__mine", {"_type": "malt", "num_responses": 1}, "raise `num_responses`"),
    ],
)
def test_what_could_never_train_is_found(key, value, told):
    write_protocol(**{key: value})
    shown = fail("check", "config.yml")
    assert re.search(told, " ".join((shown.stderr + shown.stdout).split()))
