"""A run with a warm-up that kills itself: `python -m tests.crashing_warm_up FOLDER [PLACE COUNT]`.

The model is real, and made from scratch. PLACE is where the process gets kill -9 when it comes there for the
COUNT-th time: `request`, `submit`, `adopt`, `job` (before a job of the warm-up is recorded), `over` (before
the warm-up is), `prune` or `never`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import etude
from etude.backends.local_adapter import LocalAdapter
from etude.config.load import parse_config
from etude.groups.line import ModelLine
from etude.inference.embedded import EmbeddedEngine
from etude.loop.lifecycle import new_run
from etude.loop.record import Record
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.killing import Killer

PLACES = {
    "request": (EmbeddedEngine, "complete"),
    "submit": (LocalAdapter, "submit"),
    "adopt": (ModelLine, "adopt"),
    "job": (EpochLog, "add_warm_up_job"),
    "over": (Record, "add_warm_up"),
    "prune": (LocalAdapter, "prune"),
}


@etude.workflow
async def echo(example: etude.Example, episode: etude.Episode) -> str:
    """Ask for a letter."""
    reply = await episode.chat([{"role": "user", "content": example.inputs["letter"]}])
    return reply.text


@etude.evaluator
def same(example: etude.Example, output: str) -> float:
    """Whether it is the same letter."""
    return float(output == example.inputs["letter"])


def letters() -> list[etude.Example]:
    """An example for each letter."""
    return [etude.Example(letter, {"letter": letter}, letter) for letter in "abcd"]


def careless(examples: list[etude.Example], seed: int) -> Any:
    """Half of the answers are the letter that was asked for."""
    for example in examples:
        for answer in (example.inputs["letter"], "e"):
            yield [
                {"role": "user", "content": example.inputs["letter"]},
                {"role": "assistant", "content": answer},
            ]


def config(folder: Path) -> Any:
    """Two stages: until the loss has fallen, and until the reward has risen; then two epochs."""
    here, general = "tests.crashing_warm_up:", {"max_concurrency": 16}
    stage = {"transcripts": f"{here}careless", "learning_rate": 5e-3, "batch_size": 8, "check_every": 4}
    tiny = {"hidden_size": 16, "heads": 2, "layers": 1, "intermediate_size": 32, "max_context": 32}
    return parse_config(
        {
            "llms": {"policy": {"_type": "local", "tiny": tiny, "max_tokens": 4}},
            "workflow": f"{here}echo",
            "eval": {
                "general": {**general, "dataset": f"{here}letters"},
                "evaluators": {"same": f"{here}same"},
            },
            "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4, "beta": 0.1}},
            "trainer_adapters": {"local": {"_type": "local", "learning_rate": 1e-2, "lr_schedule": "linear"}},
            "finetuning": {
                "enabled": True,
                "deterministic": True,
                "num_epochs": 2,
                "output_dir": str(folder),
                "warm_up": [{**stage, "until": {"loss": 5.2}}, {**stage, "until": {"reward": 0.1}}],
                "run_configuration": {"validation_dataset": f"{here}letters", "validation_interval": 1},
            },
        }
    )


def main(folder: Path, place: str = "never", count: str = "0") -> None:
    """Train, or go on."""
    if place != "never":
        owner, name = PLACES[place]
        setattr(owner, name, Killer(place, count).at(place, getattr(owner, name)))
    settings = config(folder)
    if (folder / "run").exists():
        with RunFolder.open(folder / "run") as run:
            asyncio.run(train_in(settings, run))
    else:
        with new_run(settings, "run") as run:
            asyncio.run(train_in(settings, run))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
