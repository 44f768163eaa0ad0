"""The run that is killed: a project whose agent asks a paid endpoint and the model that is trained.

Its weights begin at random, and with the same seeds they end the same, bit for bit, whatever is interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from etude.store.run_folder import RunFolder
from tests.times import without_times

NAME = "run"
"""Of the run."""

EXAMPLES, GENERATIONS = 4, 4
"""In an epoch."""

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

_ATTEMPTS = frozenset({"address", "retries", "retried", "waited", "remote"})
"""Which of the endpoints answered, and after how many attempts."""


def write_project(
    folder: Path, address: str, endpoints: Sequence[str], epochs: int, learners: int | None
) -> None:
    """Write a project whose runs are on the cluster at `address`, and train there or in the head."""
    from etude.models.tiny import build_policy, build_tokenizer

    folder.mkdir(parents=True)
    tokenizer = build_tokenizer(["t0?", "v0?", "hint", "0123456789"], splits=["[0-9]"])
    build_policy(tokenizer, 0).export(folder / "base")
    (folder / "agent.py").write_text(AGENT)
    for name, count in (("train", 8), ("validation", 6)):
        rows = [{"id": f"{name}{n}", "question": f"{name[0]}{n}?", "answer": "yes"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    helper = {"_type": "openai", "model_name": "helper", "base_url": [*endpoints]}
    training = {"_type": "local", "learning_rate": 3e-3, "lora": {"r": 4}, "batch_size": 4, "passes": 2}
    config: dict[str, Any] = {
        "llms": {
            "policy": {"_type": "local", "model": str(folder / "base"), "max_tokens": 8},
            "helper": helper,
        },
        "workflow": "agent:play",
        "eval": {
            "general": {"dataset": "train.jsonl", "max_concurrency": 8},
            "evaluators": {"varied": "agent:varied"},
        },
        "cluster": {"_type": "ray", "address": address, "runners": 2, "learners": learners},
        "trajectory_builders": {
            "grpo": {"_type": "grpo", "num_generations": GENERATIONS, "examples_per_epoch": EXAMPLES}
        },
        "trainer_adapters": {"local": training | ({"checkpoint_steps": 1} if learners else {})},
        "finetuning": {
            "enabled": True,
            "deterministic": True,
            "num_epochs": epochs,
            "target_model": "policy",
            "run_configuration": {"validation_dataset": "validation.jsonl", "validation_interval": 2},
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def journal_of(folder: Path) -> Path:
    """The journal of the project's run."""
    return folder / "runs" / NAME / "run.db"


def contents(folder: Path) -> dict[str, Any]:
    """All that the run's journal holds, without times and without which endpoint answered.

    That is its calls, episodes, scores, epochs and versions, with the digests of their weights.
    """
    with RunFolder.read(folder / "runs" / NAME) as run:
        # A call that was under way at a kill is made twice, and is on the bill twice; the config ends with a
        # digest of itself, paths included.
        steps = {
            key: without_times(value, *_ATTEMPTS)
            for key, value in run.journal.scan()
            if key != "config" and not key.startswith("spent/")
        }
    return dict(json.loads(json.dumps(steps).replace(str(folder), "PROJECT")))


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
