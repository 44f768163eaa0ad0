"""Runs that kill themselves: `python -m tests.crashing KIND FOLDER [PLACE COUNT]`, and tests that start them.

PLACE is where the process gets kill -9 when it comes there for the COUNT-th time. KIND is

- `now`: one model is trained; `ahead` collects for the next epoch while a job trains, which takes a moment.
  Ahead the backend still has a job after a kill; otherwise it is lost.
- `two`, `two-ahead`: a prover and a verifier are trained. PLACE counts for whichever of them comes there.
- `pool`: the trained model plays against its earlier versions.
- `warm-up`: a real model, made from scratch, imitates first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import etude
from etude.backends.local_adapter import LocalAdapter
from etude.config.finetuning import CurriculumLearningConfig, FinetuneRunConfig
from etude.config.load import parse_config
from etude.core.call import ChatRequest
from etude.core.job import ModelVersion, TrainingJobStatus
from etude.engines.embedded import EmbeddedEngine
from etude.engines.local import OpponentsConfig
from etude.groups.model_jobs import ModelJobs
from etude.groups.opponents import OpponentPool
from etude.loop.lifecycle import new_run
from etude.rollout.collector import Collector, Limits
from etude.rollout.evaluation_run import EvaluationRun
from etude.rollout.evaluator import FunctionEvaluator
from etude.rollout.workflow import Workflow
from etude.runtime import Runtime
from etude.store.log import ModelLog
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests import several
from tests.forked import ROOT, Forked
from tests.several import Several
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, Run, examples, learning_engine

Places: TypeAlias = "Mapping[str, Sequence[tuple[Any, str]]]"
"""The methods by which a process comes to each place, with what has them."""


def run_to_end(kind: str, folder: Path, *kill: Any) -> int:
    """Begin a run or go on with it: the exit code. What is to be killed is a process of its own."""
    folder.mkdir(exist_ok=True)
    if not kill:
        main(kind, folder)
        return 0
    command = ["-m", "tests.crashing", kind, str(folder), *map(str, kill)]
    process = Forked(command, ROOT, dict(os.environ), program="python")
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode


def killed_and_whole(kind: str, folder: Path, kills: Sequence[tuple[str, int]]) -> tuple[Path, Path]:
    """The folders of a run that was killed at each of those places, and of one that was not."""
    killed, whole = folder / "killed", folder / "whole"
    assert run_to_end(kind, whole) == 0
    for kill in kills:
        assert run_to_end(kind, killed, *kill) == -signal.SIGKILL, kill
    assert run_to_end(kind, killed) == 0
    return killed, whole


def kill_at(places: Places, place: str, count: int) -> None:
    """Have this process end by SIGKILL when it comes to a place for the given time."""
    left = count

    def dying(method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return await method(*args, **kwargs)

        return call

    for owner, name in places.get(place, ()):
        setattr(owner, name, dying(getattr(owner, name)))


def main(kind: str, folder: Path, place: str = "never", count: str = "0") -> None:
    """Train, or go on."""
    make = {"pool": _pool, "warm-up": _warm_up}.get(kind, _two if kind.startswith("two") else _one)
    work, places = make(folder, kind.endswith("ahead"))
    kill_at(places, place, int(count))
    asyncio.run(work)


def _one(folder: Path, ahead: bool) -> tuple[Any, Places]:
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
    return run.start(num_epochs=4), list_places([run.engine], run.adapter)


def list_places(engines: Sequence[Any], adapter: Any) -> Places:
    """Those of a run of `tests.training`."""
    return {
        "request": [(engine, "complete") for engine in engines],
        "adopt": [(engine, "adopt") for engine in engines],
        "submit": [(adapter, "submit")],
        "wait": [(adapter, "wait_until_complete")],
        "prune": [(adapter, "prune")],
    }


def _two(folder: Path, ahead: bool) -> tuple[Any, Places]:
    run = Several(folder / "run")
    for name in run.engines:
        run.engines[name] = learning_engine(log=folder / f"sampled-{name}.log", base=30 + 5 * len(name))
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1}
    held_out = {"_type": "test_counted", "prefix": "v"}
    settings = several.config(
        num_epochs=4,
        prover={"every": 2, "curriculum_learning": curriculum},
        trainer_adapters={"backend": {"_type": "test_several", "lose_jobs": not ahead}},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": 1}},
        finetuning={
            "collect_ahead": ahead,
            "run_configuration": {"validation_dataset": held_out, "validation_interval": 2},
        },
    )
    return run.start(settings), list_places([*run.engines.values()], several.FakeAdapter)


async def play(example: etude.Example, episode: Any) -> str:
    """Who says yes alone wins."""
    question = [{"role": "user", "content": example.inputs["question"]}]
    guesses = [(await episode.chat(question, model=seat)).text for seat in ("policy", "opponent")]
    return "draw" if guesses[0] == guesses[1] else "won" if guesses[0] == "yes" else "lost"


def points(example: etude.Example, output: str) -> float:
    """1, 0.5 or 0."""
    return {"won": 1.0, "draw": 0.5, "lost": 0.0}[output]


class Guessing(ScriptedEngine):
    """An opponent."""


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
        return Guessing(answer)

    def _runtime(self, folder: RunFolder) -> Runtime:
        pool = OpponentPool("opponent", self.config, folder.journal, 5, self.make)
        models = {"policy": self.engine, "opponent": pool}
        collector = Collector(Workflow("play", play), models, folder.journal, limits=Limits(8, 30.0, 10))
        evaluation = EvaluationRun(collector, {"correct": FunctionEvaluator(points)}, folder.journal)
        return replace(super()._runtime(folder), engines=models, evaluation=evaluation)


def _pool(folder: Path, ahead: bool) -> tuple[Any, Places]:
    run = AgainstPool(folder / "run", OpponentsConfig(of="policy", size=2), keep_checkpoints=1)
    run.adapter = FakeAdapter(folder / "backend", lose_jobs=True)
    run.examples, run.validation = examples(6), examples(4, "v")
    places = {**list_places([run.engine], run.adapter), "guess": [(Guessing, "complete")]}
    return run.start(num_epochs=4), places


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
        question = {"role": "user", "content": example.inputs["letter"]}
        for answer in (example.inputs["letter"], "e"):
            yield [question, {"role": "assistant", "content": answer}]


def warm_up_config(folder: Path) -> Any:
    """Two stages: until the loss has fallen, and until the reward has risen; then two epochs."""
    here = "tests.crashing:"
    stage = {"transcripts": f"{here}careless", "learning_rate": 5e-3, "batch_size": 8, "check_every": 4}
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
                "warm_up": [{**stage, "until": {"loss": 5.2}}, {**stage, "until": {"reward": 0.1}}],
                "run_configuration": {"validation_dataset": f"{here}letters", "validation_interval": 1},
            },
        }
    )


def _warm_up(folder: Path, ahead: bool) -> tuple[Any, Places]:
    settings = warm_up_config(folder)

    async def train() -> None:
        with RunFolder.open(folder / "run") if (folder / "run").exists() else new_run(settings, "run") as run:
            await train_in(settings, run)

    places = {
        "request": [(EmbeddedEngine, "complete")],
        "submit": [(LocalAdapter, "submit")],
        "adopt": [(ModelJobs, "adopt")],
        "record": [(ModelLog, "add")],
        "prune": [(LocalAdapter, "prune")],
    }
    return train(), places


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
