"""The run that is killed: a project whose agent asks a paid endpoint and the model that is trained.

Its weights begin at random, and with the same seeds they end the same, bit for bit, whatever is interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from etude.models.tiny import build_policy, build_tokenizer
from tests.cli.killed import everything
from tests.cli.projects import change, local_project

NAME = "run"
"""Of the run."""

AGENT = '''
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    question = [{"role": "user", "content": example.inputs["question"]}]
    hint = await episode.chat(question, model="helper")
    reply = await episode.chat([*question, {"role": "user", "content": hint.text}], model="policy")
    return reply.text


@etude.evaluator
def varied(example: etude.Example, output: str) -> float:
    """The share of different letters: even a model that has learnt nothing gets some."""
    return len(set(output)) / 8
'''


def write_project(folder: Path, address: str, endpoint: str, epochs: int, learners: int | None) -> None:
    """Write a project whose runs are on the cluster at `address`, and train there or in the head."""
    tokenizer = build_tokenizer(["t0?", "v0?", "hint", "0123456789"], splits=["[0-9]"])
    build_policy(tokenizer, 0).export(folder / "base")
    training = {"_type": "local", "learning_rate": 3e-3, "lora": {"r": 4}, "batch_size": 4, "passes": 2}
    config = local_project(folder, folder / "base")
    (folder / "agent.py").write_text(AGENT)
    change(
        config,
        llms__helper={"_type": "openai", "model_name": "helper", "base_url": endpoint},
        eval__general__max_concurrency=8,
        cluster={"_type": "ray", "address": address, "runners": 2, "learners": learners},
        trainer_adapters__local=training | ({"checkpoint_steps": 1} if learners else {}),
        finetuning__deterministic=True,
        finetuning__num_epochs=epochs,
        finetuning__target_model="policy",
        finetuning__run_configuration__validation_interval=2,
    )


def run_path(folder: Path) -> Path:
    """The folder of the project's run."""
    return folder / "runs" / NAME


def contents(folder: Path) -> dict[str, Any]:
    """All that the run's journal holds, without times."""
    return everything(run_path(folder), "retries", "retried", "waited", "remote")


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """The steps in which two journals differ, in words."""
    lines = [f"{key} is missing" for key in expected.keys() - actual.keys()]
    lines += [f"{key} is there in addition" for key in actual.keys() - expected.keys()]
    lines += [
        f"{key}: {_first_difference(expected[key], actual[key])}"
        for key in expected.keys() & actual.keys()
        if expected[key] != actual[key]
    ]
    return sorted(lines)


def _first_difference(expected: Any, actual: Any, path: str = "") -> str:
    if isinstance(expected, dict) and isinstance(actual, dict):
        pairs: Iterable[tuple[Any, Any, Any]] = (
            (key, expected.get(key), actual.get(key)) for key in [*expected, *actual]
        )
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = zip(range(len(expected)), expected, actual, strict=True)
    else:
        return f"{path or 'it'} is {json.dumps(actual)[:200]} in place of {json.dumps(expected)[:200]}"
    key, left, right = next(pair for pair in pairs if pair[1] != pair[2])
    return _first_difference(left, right, f"{path}.{key}".lstrip("."))
