"""Small projects to try commands on, and two ways to type a command."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.main
import typer.testing
import yaml

from etude.cli.app import app
from tests.forked import Forked

ROOT = Path(__file__).parents[2]

# Each call of a command would make all of them anew.
typer.testing._get_command = functools.cache(typer.main.get_command)

AGENT = '''
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text


@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    return float(output == example.expected)


@etude.evaluator
def vary(example: etude.Example, output: str) -> float:
    """The share of different letters: even a model that has learnt nothing gets some."""
    return len(set(output)) / 8


@etude.evaluator
def brief(example: etude.Example, output: str) -> tuple[float, str]:
    return 1 / (1 + len(output)), "shorter is better"
'''

TWO_MODELS = """
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    question = [{"role": "user", "content": example.inputs["question"]}]
    replies = [(await episode.chat(question, model=name)).text for name in ("left", "right")]
    return " ".join(replies)


@etude.evaluator
def vary(example: etude.Example, output: str) -> float:
    return len(set(output)) / 16
"""


def rows(count: int, prefix: str) -> str:
    lines = [{"id": f"{prefix}{n}", "question": f"{prefix}{n}?", "answer": "yes"} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def scripted_project(folder: Path) -> Path:
    """A project whose model and backend need no torch; the path of its config."""
    config: dict[str, Any] = {
        "llms": {"policy": {"_type": "tests.cli.parts:open_scripted"}},
        "workflow": "agent:play",
        "eval": {
            "general": {"dataset": "train.jsonl"},
            "evaluators": {"correct": "agent:correct", "brief": "agent:brief"},
        },
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4}},
        "trainer_adapters": {"counting": {"_type": "tests.cli.parts:counting"}},
        "finetuning": {
            "enabled": True,
            "num_epochs": 2,
            "reward_function": {"name": "correct"},
            "run_configuration": {"validation_dataset": "validation.jsonl"},
        },
    }
    return _write(folder, config)


def local_project(folder: Path, base: Path) -> Path:
    """A project that trains a tiny model in this process; the path of its config."""
    config: dict[str, Any] = {
        "llms": {"policy": {"_type": "local", "model": str(base), "max_tokens": 8}},
        "workflow": "agent:play",
        "eval": {"general": {"dataset": "train.jsonl"}, "evaluators": {"varied": "agent:vary"}},
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4, "examples_per_epoch": 4}},
        "trainer_adapters": {"local": {"_type": "local", "learning_rate": 3e-3}},
        "finetuning": {
            "enabled": True,
            "num_epochs": 2,
            "run_configuration": {"validation_dataset": "validation.jsonl", "validation_interval": 1},
        },
    }
    return _write(folder, config)


def train_two_models(project: Path, base: Path) -> None:
    """Have a project's agent ask two models, both of which are trained."""
    (project / "agent.py").write_text(TWO_MODELS)
    model = {"_type": "local", "model": str(base), "max_tokens": 8}
    change(
        project / "config.yml",
        llms={"left": model, "right": model},
        trajectory_builders={"grpo": {"_type": "grpo", "num_generations": 4}},
        finetuning__targets={"left": {}, "second": {"model": "right"}},
    )


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text(rows(8, "t"))
    (folder / "validation.jsonl").write_text(rows(6, "v"))
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def change(config: Path, **paths: Any) -> None:
    """Set keys of a config file; `a__b` is `a.b`."""
    data = yaml.safe_load(config.read_text())
    for path, value in paths.items():
        node = data
        *parents, last = path.split("__")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    config.write_text(yaml.safe_dump(data, sort_keys=False))


def etude(*arguments: Any) -> Any:
    """A command in this process; `exit_code`, `stdout` and `stderr` of it."""
    return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: Any) -> Any:
    """The same of a command that must succeed."""
    return fail(*arguments, code=0)


def fail(*arguments: Any, code: int = 2) -> Any:
    """The same of a command that must end with this code."""
    shown = etude(*arguments)
    assert shown.exit_code == code, shown.output
    return shown


def process(*arguments: Any, folder: Path, environment: Mapping[str, str] | None = None) -> Forked:
    """A command in a process of its own, with pipes; forked, so that it starts at once."""
    return Forked([*map(str, arguments)], folder, {**os.environ, **(environment or {})})


def run_to_end(
    *arguments: Any, folder: Path, timeout: float = 120, code: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A command in a forked process, run to its end, which must be by this code."""
    started = process(*arguments, folder=folder, **options)
    output, errors = started.communicate(timeout=timeout)
    assert started.wait() == code, output + errors
    return subprocess.CompletedProcess(started.args, code, output, errors)


def started_anew(
    *arguments: Any, folder: Path, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python -m etude ARGUMENTS`, run to its end: with all its imports."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "etude", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output, a line each."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]
