"""No secret in any byte that commands write, and no file that others may read, whatever happens in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import canaries
from tests.cli.projects import process

SCRIPTED = {
    "llms": {"policy": {"_type": "tests.cli.parts:scripted"}},
    "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 2}},
    "trainer_adapters": {"counting": {"_type": "tests.cli.parts:counting"}},
    "finetuning": {"enabled": True, "num_epochs": 1, "target_model": "policy", "error_budget": 1.0},
}


class Typed:
    """Commands in a project, and their outputs."""

    def __init__(self, project: Any) -> None:
        self.project = project
        self.outputs: dict[str, str] = {}

    def __call__(self, *words: str, code: int = 0) -> str:
        """A command, run to its end."""
        started = process(*words, folder=self.project.folder, environment=self.project.environment)
        output, errors = started.communicate(timeout=100)
        assert started.wait() == code, output + errors
        self.outputs[" ".join(words)] = output + errors
        return output + errors


def test_a_run_that_goes_wrong_everywhere_tells_no_secret(tmp_path: Path):
    storage = {"storage": f"file://{tmp_path / 'project' / 'backup'}"}
    with canaries.planted(tmp_path / "project", SCRIPTED | storage) as project:
        typed = Typed(project)
        shown = typed("train", "config.yml", "--name", "r")
        assert "**********" in shown
        typed("resume", "r", "-o", "finetuning.num_epochs=2")
        typed("runs", "show", "r")
        typed("runs", "check", "r")
        typed("evaluate", "config.yml", "--name", "e", "--json")
        tool = typed("episodes", "show", "train/2/t3/0", "--run", "r")
        assert "the dictionary refused **********" in tool
        assert "Authorization-Too" in typed("episodes", "show", "train/2/t2/0", "--run", "r")
        assert canaries.leaks(project, typed.outputs) == []
        others = canaries.readable_by_others(project.folder / "runs")
        assert [path for path in others if "/backend" not in path] == []  # The test's own adapter.
        assert canaries.readable_by_others(project.folder / "backup") == []
        wrong = typed("train", "config.yml", "-o", "workflow.function=agent:gone", "--name", "w", code=2)
        assert canaries.leaks(project, {"wrong": wrong}) == []


@pytest.mark.slow
def test_nor_do_processes_of_runners_and_the_commands_that_look_at_a_config(tmp_path: Path):
    isolated = {"eval": {"general": {"isolation": "process", "max_concurrency": 2}}}
    with canaries.planted(tmp_path / "project", SCRIPTED | isolated) as project:
        typed = Typed(project)
        typed("train", "config.yml", "--name", "r")
        typed("check", "config.yml")
        typed("doctor", "config.yml", code=1)
        typed("train", "config.yml", "--name", "d", "--debug", "-o", "finetuning.error_budget=0.0", code=1)
        assert canaries.leaks(project, typed.outputs) == []
        others = canaries.readable_by_others(project.folder / "runs")
        assert [path for path in others if "/backend" not in path] == []
