"""`nat finetune` of the real toolkit, with Etude inside.

ETUDE_TEST_NAT=path/to/nat pytest -m nat
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integrations.nat.toolkit import SECONDS, calls, journal
from tests.support import read_summary, wait_until

pytestmark = pytest.mark.nat

MANY = {"trajectory_builders__rollouts__builder": {"num_generations": 16, "examples_per_epoch": 8}}
"""128 episodes in an epoch, to learn from; elsewhere 32 are enough."""
KILLED_AFTER = 300
"""Calls of the run that is killed, in the third of four epochs."""


def test_held_out_rewards_rise_at_the_default_log_level(project):
    project.configure(**MANY)
    done = project.finetune(
        "--validation_dataset", project.validation, "--validation_interval", "12",
        "-o", "finetuning.num_epochs", "12",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    [run] = project.runs
    told = read_summary(run)
    assert told["measured_on"] == "validation"
    assert told["before"]["n"] == told["after"]["n"] == 512
    assert told["after"]["avg_reward"] > told["before"]["avg_reward"] + 0.1
    assert "Finetuning completed successfully" in done.stdout
    assert "Traceback" not in done.stdout


def test_every_call_is_kept_with_its_tokens_and_belongs_to_its_episode(project):
    project.configure(finetuning__num_epochs=1)
    assert project.finetune().returncode == 0
    steps = journal(project.runs[0])
    made = calls(steps)
    assert len(made) == 32
    for key, call in made.items():
        episode = json.loads(steps[key.split("/call/")[0]])
        assert call["completion"]["completion_ids"] and call["completion"]["logprobs"]
        assert episode["example"]["inputs"]["question"] in json.dumps(call)


def test_a_killed_run_goes_on_when_the_same_command_is_typed_again(project):
    project.configure(finetuning__num_epochs=4, **MANY)
    first = subprocess.Popen(
        project.command(), cwd=project.folder, env=project.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        before = _wait_for_calls(project, first)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    done = project.finetune()
    assert done.returncode == 0, done.stdout
    [run] = project.runs
    after = calls(journal(run))
    assert len(after) == 4 * 128
    assert {key: after[key] for key in before} == before
    assert read_summary(run)["epochs_trained"] == 4
    again = project.finetune("-o", "finetuning.num_epochs", "1")
    assert again.returncode == 0, again.stdout
    assert len(project.runs) == 2, "a run that is finished is not resumed"


def _wait_for_calls(project, process):
    def enough_calls():
        made = calls(journal(project.runs[0])) if project.runs else {}
        assert process.poll() is None, "it ended before it could be killed"
        return made if len(made) >= KILLED_AFTER else None

    return wait_until(enough_calls, SECONDS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eval__evaluators": {"in_place": {"_type": "test_same"}}}, "trained on nothing"),
        ({"eval__evaluators": {"in_place": {"_type": "test_zero"}}}, "trained on nothing"),
        ({"eval__evaluators": {"in_place": {"_type": "test_broken"}}}, "the judge is asleep"),
        ({"workflow": {"_type": "test_failing"}}, "the agent is out of order"),
        ({"workflow": {"_type": "test_foreign", "llm": "sorter"}}, "Wrapper: `llama_index`"),
        ({"finetuning__reward_function": {"name": "in_pace"}}, "did you mean 'in_place'"),
        ({"finetuning__target_model": "sorted"}, "no model 'sorted'"),
    ],
)
def test_what_cannot_train_fails_and_says_why(project, changes, told):
    project.configure(**changes)
    done = project.finetune()
    assert done.returncode == 1, done.stdout
    assert told in done.stdout.splitlines()[-1] or told in done.stdout[-2000:], done.stdout
    assert "Finetuning completed successfully" not in done.stdout


def test_functions_are_told_apart_and_evaluators_see_the_steps(project):
    project.configure(
        functions={"guesser": {"_type": "test_guess", "llm": "sorter"}},
        workflow={"_type": "test_twice", "llm": "sorter", "helper": "guesser"},
        eval__evaluators={"steps": {"_type": "test_steps"}},
        finetuning__reward_function={"name": "steps"},
        finetuning__target_functions=["guesser"],
        finetuning__num_epochs=1,
    )
    done = project.finetune("--result_json_path", "$.guessed")
    assert done.returncode == 0, done.stdout
    steps = journal(project.runs[0])
    scores = [json.loads(value) for key, value in steps.items() if key.endswith("/score/steps")]
    assert len(scores) == 32
    assert all(score["reasoning"] == ["guesser", "<workflow>"] for score in scores)
    assert {call["function"] for call in calls(steps).values()} == {"guesser", "<workflow>"}
    metrics = [json.loads(line) for line in (project.runs[0] / "training_metrics.jsonl").open()]
    # One trajectory of each episode, of the function that is trained.
    assert metrics[0]["num_trajectories"] <= 32


def test_evaluators_of_the_toolkit_count_the_tokens_of_an_agent_that_streams(project):
    project.configure(
        workflow={"_type": "test_streaming", "llm": "sorter"},
        eval__evaluators__tokens={"_type": "avg_tokens_per_llm_end"},
        finetuning__num_epochs=1,
    )
    done = project.finetune()
    assert done.returncode == 0, done.stdout
    steps = journal(project.runs[0])
    scores = [json.loads(value)["score"] for key, value in steps.items() if key.endswith("/score/tokens")]
    assert len(scores) == 32 and min(scores) > 0


def test_a_config_of_etude_runs_the_toolkits_agent(project):
    (project.folder / "etude.yml").write_text(
        yaml.safe_dump(
            {
                "llms": {
                    "sorter": {"_type": "local", "model": str(project.base / "model"), "max_tokens": 12}
                },
                "workflow": {"_type": "nat", "config_file": "config.yml"},
                "eval": {
                    "general": {"dataset": {"_type": "nat"}},
                    "evaluators": {"in_place": {"_type": "nat", "evaluator": "in_place"}},
                },
                "trajectory_builders": {"grpo": {"_type": "grpo", "examples_per_epoch": 4}},
                "finetuning": {"enabled": True, "output_dir": "runs"},
            }
        )
    )
    etude = Path(project.command()[0]).with_name("etude")
    done = project.run([str(etude), "train", "etude.yml"])
    assert done.returncode == 0, done.stdout
    assert len(calls(journal(project.runs[0]))) == 4 * 8
