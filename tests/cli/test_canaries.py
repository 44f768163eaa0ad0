"""No secret in any byte that commands write, and no file that others may read, whatever happens in a run."""

from pathlib import Path

import pytest

from tests import canaries

SCRIPTED = {
    "llms": {"policy": {"_type": "tests.cli.parts:open_scripted"}},
    "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 2}},
    "trainer_adapters": {"counting": {"_type": "tests.cli.parts:counting"}},
    "finetuning": {"enabled": True, "num_epochs": 1, "target_model": "policy", "error_budget": 1.0},
}


def test_a_run_that_goes_wrong_everywhere_tells_no_secret(tmp_path: Path):
    storage = {"storage": f"file://{tmp_path / 'project' / 'backup'}"}
    with canaries.plant(tmp_path / "project", SCRIPTED | storage) as project:
        assert "**********" in project.type("train", "config.yml", "--name", "r")
        project.type("resume", "r", "-o", "finetuning.num_epochs=2")
        project.type("runs", "show", "r")
        project.type("runs", "check", "r")
        project.type("evaluate", "config.yml", "--name", "e", "--json")
        tool = project.type("episodes", "show", "train/2/t3/0", "--run", "r")
        assert "the dictionary refused **********" in tool
        assert "Authorization-Too" in project.type("episodes", "show", "train/2/t2/0", "--run", "r")
        others = canaries.readable_by_others(project.folder / "runs")
        assert [path for path in others if "/backend" not in path] == []  # The test's own adapter.
        assert canaries.readable_by_others(project.folder / "backup") == []
        project.type("train", "config.yml", "-o", "workflow.function=agent:gone", "--name", "w", code=2)
        assert project.leaks() == []


@pytest.mark.slow
def test_nor_do_processes_of_runners_and_the_commands_that_look_at_a_config(tmp_path: Path):
    isolated = {"eval": {"general": {"isolation": "process", "max_concurrency": 2}}}
    with canaries.plant(tmp_path / "project", SCRIPTED | isolated) as project:
        project.type("train", "config.yml", "--name", "r")
        project.type("check", "config.yml")
        project.type("doctor", "config.yml", code=1)
        failing = ("--debug", "-o", "finetuning.error_budget=0.0")
        project.type("train", "config.yml", "--name", "d", *failing, code=1)
        assert project.leaks() == []
        others = canaries.readable_by_others(project.folder / "runs")
        assert [path for path in others if "/backend" not in path] == []
