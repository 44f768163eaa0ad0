"""The examples learn at a language-model server in another process; their agents are unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.cli.projects import process
from tests.server.process import ServerProcess

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def copied(example: str, folder: Path) -> Path:
    there = folder / example
    shutil.copytree(EXAMPLES / example, there, ignore=shutil.ignore_patterns("base", "runs", "__pycache__"))
    return there


def make_base(project: Path, *options: str) -> None:
    subprocess.run([sys.executable, "base.py", *options], cwd=project, check=True, timeout=600)


def at_servers(
    project: Path, servers: ExitStack, learning_rate: float, batch_size: int
) -> dict[str, dict[str, Any]]:
    """Overrides that put each model of a config on a server of its own, and have it trained there."""
    config = yaml.safe_load((project / "config.yml").read_text())
    overrides: dict[str, dict[str, Any]] = {}
    for name, llm in config["llms"].items():
        data = project / f"server-{name}"
        data.mkdir()
        server = servers.enter_context(ServerProcess(project / llm["model"], data, "--name", name))
        overrides[f"llms.{name}"] = {
            "_type": "openai",
            "provider": "etude",
            "model_name": name,
            "base_url": f"{server.address}/v1",
            "api_key": "none",
            "max_tokens": llm["max_tokens"],
        }
    hyperparameters = {"learning_rate": learning_rate, "batch_size": batch_size, "lora_rank": 0}
    for name in config["trainer_adapters"]:
        overrides[f"trainer_adapters.{name}"] = {"_type": "lm_server", "hyperparameters": hyperparameters}
    return overrides


def train(project: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The summary of what `etude train` did."""
    options = [part for key, value in overrides.items() for part in ("-o", f"{key}={json.dumps(value)}")]
    started = process("train", "config.yml", "--name", "run", *options, folder=project)
    _, errors = started.communicate(timeout=1200)
    assert started.returncode == 0, errors
    summary: dict[str, Any] = json.loads((project / "runs" / "run" / "summary.json").read_text())
    return summary


def epochs(number: int, examples: int) -> dict[str, Any]:
    return {
        "finetuning.num_epochs": number,
        "finetuning.run_configuration.validation_interval": number,
        "trajectory_builders.grpo.examples_per_epoch": examples,
    }


@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_the_demo_learns(tmp_path: Path, ahead: bool) -> None:
    project = copied("calculator", tmp_path)
    make_base(project, "--seed", "0", "--out", "base")
    with ExitStack() as servers:
        overrides = at_servers(project, servers, 5e-4, 128) | epochs(12, 48)
        summary = train(project, overrides | {"finetuning.collect_ahead": ahead})
    assert summary["before"]["avg_reward"] < 0.45
    assert summary["after"]["avg_reward"] > 0.7


def test_a_prover_and_a_verifier_learn_at_a_server_each(tmp_path: Path) -> None:
    project = copied("prover_verifier", tmp_path)
    make_base(project)
    with ExitStack() as servers:
        summary = train(project, at_servers(project, servers, 1e-3, 512) | epochs(14, 32))
    verifier = summary["targets"]["verifier"]
    assert verifier["after"]["reward_low"] > verifier["before"]["reward_high"] + 0.3
    assert summary["targets"]["prover"]["last_version"]["number"] > 0


def test_a_script_that_knows_nothing_of_etude_is_trained(tmp_path: Path) -> None:
    copied("sort", tmp_path)
    make_base(tmp_path / "sort", "--seed", "0", "--out", "base")
    project = copied("script", tmp_path)
    with ExitStack() as servers:
        overrides = at_servers(project, servers, 5e-4, 32)
        summary = train(project, overrides | {"finetuning.num_epochs": 2})
        version = summary["last_version"]
        assert version["number"] == summary["epochs_trained"] == 2
        url = overrides["llms.sorter"]["base_url"]
        assert version["location"] in [
            model.id for model in openai.OpenAI(base_url=url, api_key="none").models.list()
        ]
