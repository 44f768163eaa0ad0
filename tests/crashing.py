"""Runs that are killed: `python -m tests.crashing KIND FOLDER NUMBER`, and tests that start them.

The process gets kill -9 before its NUMBER-th operation on the folder; with 0 it is not killed. KIND is `now`,
one model; `ahead`, collecting while a job trains that outlives a kill; `two`, `two-ahead`, two of them;
`pool`, a model and its earlier versions; `warm-up`, a real model that imitates first.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import etude
from etude.config.finetuning import CurriculumLearningConfig, FinetuneRunConfig
from etude.config.load import parse_config
from etude.core.call import ChatRequest
from etude.core.job import ModelVersion, TrainingJobStatus
from etude.engines.local import OpponentsConfig
from etude.groups.opponents import OpponentPool
from etude.store.run_folder import RunFolder
from etude.verbs import new_run, train_in
from tests import several
from tests.file_operations import die_at, is_killed, operations_log
from tests.several import Several
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, Run, examples, learning_engine


def run_to_end(kind: str, folder: Path) -> None:
    """Begin a run or go on with it."""
    folder.mkdir(exist_ok=True)
    asyncio.run(_work(kind, folder))


def killed_and_whole(kind: str, folder: Path, kills: int) -> tuple[Path, Path]:
    """The folders of a run that was killed so many times, anywhere, and of one that was not."""
    killed, whole = folder / "killed", folder / "whole"
    assert not is_killed(kind, whole, 0, folder=folder, module=__name__)
    most, chance = operations_log(whole).stat().st_size, random.Random(kind)
    numbers = [chance.randint(1, most // 2) for _ in range(kills)]
    assert is_killed(kind, killed, most // 3, folder=folder, module=__name__)
    for number in numbers:
        if not is_killed(kind, killed, number, folder=folder, module=__name__):
            break
    else:
        run_to_end(kind, killed)
    return killed, whole


def main(kind: str, folder: str, number: str) -> None:
    """Train, or go on."""
    die_at(Path(folder), int(number))
    run_to_end(kind, Path(folder))


def _work(kind: str, folder: Path) -> Any:
    make = {"pool": _pool, "warm-up": _warm_up}.get(kind, _two if kind.startswith("two") else _one)
    return make(folder, kind.endswith("ahead"))


def _one(folder: Path, ahead: bool) -> Any:
    async def after_a_moment(status: TrainingJobStatus) -> TrainingJobStatus:
        await asyncio.sleep(0.05)
        return status

    run = Run(folder / "run", keep_checkpoints=1)
    run.engine = learning_engine(log=folder / "sampled-policy.log")
    run.adapter = FakeAdapter(folder / "backend", lose_jobs=not ahead)
    run.examples, run.validation = examples(4), examples(6, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=2)
    run.finetuning.curriculum_learning = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.5, increment_percentile=0.25, expansion_interval=1
    )
    if ahead:
        run.finetuning.collect_ahead = True
        run.adapter.behave = after_a_moment
    return run.start(num_epochs=4)


def _two(folder: Path, ahead: bool) -> Any:
    run = Several(folder / "run")
    for name in run.engines:
        run.engines[name] = learning_engine(log=folder / f"sampled-{name}.log", base=30 + 5 * len(name))
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1}
    settings = several.config(
        num_epochs=4,
        prover={"every": 2, "curriculum_learning": curriculum},
        trainer_adapters={"backend": {"_type": "tests.cli.parts:counting", "lose_jobs": not ahead}},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": 1}},
        finetuning={
            "collect_ahead": ahead,
            "run_configuration": {"validation_dataset": "tests.several:held_out", "validation_interval": 2},
        },
    )
    return run.start(settings)


async def play(example: etude.Example, episode: Any) -> str:
    """Who says yes alone wins."""
    question = [{"role": "user", "content": example.inputs["question"]}]
    guesses = [(await episode.chat(question, model=seat)).text for seat in ("policy", "opponent")]
    return "draw" if guesses[0] == guesses[1] else "won" if guesses[0] == "yes" else "lost"


def points(example: etude.Example, output: str) -> float:
    """1, 0.5 or 0."""
    return {"won": 1.0, "draw": 0.5, "lost": 0.0}[output]


class AgainstPool(Run):
    """A run in which `opponent` plays earlier versions of `policy`."""

    def __init__(self, path: Path, config: OpponentsConfig, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.config, self.workflow, self.evaluator = config, play, points
        self.made: list[int] = []
        """The versions that engines were made for."""

    async def make(self, version: ModelVersion | None) -> ScriptedEngine:
        """A version's engine: what the trained model's said when it was at that version."""
        number = 0 if version is None else version.number

        def answer(request: ChatRequest) -> str:
            return "yes" if request.key % 100 < 30 + 15 * number else "no"

        self.made.append(number)
        return ScriptedEngine(answer)

    def models(self, folder: RunFolder) -> dict[str, Any]:
        """The trained model, and a pool of its versions."""
        pool = OpponentPool("opponent", self.config, folder.journal, 5, self.make)
        return {**super().models(folder), "opponent": pool}


def _pool(folder: Path, ahead: bool) -> Any:
    run = AgainstPool(folder / "run", OpponentsConfig(of="policy", size=2), keep_checkpoints=1)
    run.adapter = FakeAdapter(folder / "backend", lose_jobs=True)
    run.examples, run.validation = examples(6), examples(4, "v")
    return run.start(num_epochs=4)


@etude.workflow
async def echo(example: etude.Example, episode: etude.Episode) -> str:
    """Ask for a letter."""
    return (await episode.chat([{"role": "user", "content": example.inputs["letter"]}])).text


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
        question = {"role": "user", "content": example.inputs["letter"]}
        for answer in (example.inputs["letter"], "e"):
            yield [question, {"role": "assistant", "content": answer}]


def warm_up_config(folder: Path) -> Any:
    """A warm-up until the reward has risen; then two epochs."""
    here = "tests.crashing:"
    warm_up = {"transcripts": f"{here}careless", "learning_rate": 5e-3, "batch_size": 8, "check_every": 4}
    tiny = {"hidden_size": 16, "heads": 2, "layers": 1, "max_context": 32}
    return parse_config(
        {
            "llms": {"policy": {"_type": "local", "tiny": tiny, "max_tokens": 4}},
            "workflow": f"{here}echo",
            "eval": {
                "general": {"max_concurrency": 16, "dataset": f"{here}letters"},
                "evaluators": {"same": f"{here}same"},
            },
            "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4, "beta": 0.1}},
            "trainer_adapters": {"local": {"_type": "local", "learning_rate": 1e-2, "lr_schedule": "linear"}},
            "finetuning": {
                "enabled": True,
                "deterministic": True,
                "num_epochs": 2,
                "output_dir": str(folder),
                "warm_up": {**warm_up, "until": {"reward": 0.1}},
                "run_configuration": {"validation_dataset": f"{here}letters", "validation_interval": 1},
            },
        }
    )


async def _warm_up(folder: Path, ahead: bool) -> None:
    settings = warm_up_config(folder)
    with RunFolder.open(folder / "run") if (folder / "run").exists() else new_run(settings, "run") as run:
        await train_in(settings, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
