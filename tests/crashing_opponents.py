"""A run against a pool that kills itself: `python -m tests.crashing_opponents FOLDER [PLACE COUNT]`.

The trained model and its earlier versions play one guess each. PLACE is where the process gets kill -9 when
it comes there for the COUNT-th time: `request`, `guess` (of an opponent), `submit`, `adopt`, `prune` or
`never`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.core.call import ChatRequest
from etude.core.example import Example
from etude.core.job import ModelVersion
from etude.groups.opponents import OpponentPool
from etude.inference.opponents_config import OpponentsConfig
from etude.rewards.evaluation_run import EvaluationRun
from etude.rewards.evaluator import FunctionEvaluator
from etude.rollout.collector import Collector, Limits
from etude.rollout.workflow import Workflow
from etude.runtime import Runtime
from etude.store.run_folder import RunFolder
from tests.killing import Killer
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, Run, examples, learning_engine


async def play(example: Example, episode: Any) -> str:
    """Who says yes alone wins."""
    question = [{"role": "user", "content": example.inputs["question"]}]
    guesses = [(await episode.chat(question, model=seat)).text for seat in ("policy", "opponent")]
    return "draw" if guesses[0] == guesses[1] else "won" if guesses[0] == "yes" else "lost"


def points(example: Example, output: str) -> float:
    """1, 0.5 or 0."""
    return {"won": 1.0, "draw": 0.5, "lost": 0.0}[output]


class AgainstPool(Run):
    """A run in which `opponent` plays earlier versions of `policy`."""

    def __init__(self, path: Path, config: OpponentsConfig, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.config, self.workflow, self.evaluator = config, play, points
        self.made: list[int] = []
        """The versions that engines were made for."""
        self.guess: Any = None
        """In place of `complete` of the opponents' engines."""

    async def make(self, version: ModelVersion | None) -> ScriptedEngine:
        """A version's engine: what the trained model's said when it was at that version."""
        number = 0 if version is None else version.number

        def answer(request: ChatRequest) -> str:
            return "yes" if request.key % 100 < 30 + 15 * number else "no"

        self.made.append(number)
        engine = ScriptedEngine(answer)
        if self.guess is not None:
            engine.complete = self.guess(engine.complete)  # type: ignore[method-assign]
        return engine

    def _runtime(self, folder: RunFolder) -> Runtime:
        pool = OpponentPool("opponent", self.config, folder.journal, 5, None, self.make)
        models = {"policy": self.engine, "opponent": pool}
        collector = Collector(Workflow("play", play), models, folder.journal, limits=Limits(8, 30.0, 10))
        evaluation = EvaluationRun(collector, {"correct": FunctionEvaluator(points)}, folder.journal)
        return replace(super()._runtime(folder), engines=models, evaluation=evaluation)


def main(folder: Path, place: str = "never", count: str = "0") -> None:
    """Train, or go on."""
    run = AgainstPool(folder / "run", OpponentsConfig(of="policy", draw="rating", size=2), keep_checkpoints=1)
    run.engine = learning_engine()
    run.adapter = FakeAdapter(folder / "backend", lose_jobs=True)
    run.examples, run.validation = examples(6), examples(4, "v")
    dying = Killer(place, count).at

    run.guess = lambda method: dying("guess", method)
    run.engine.complete = dying("request", run.engine.complete)  # type: ignore[method-assign]
    run.engine.adopt = dying("adopt", run.engine.adopt)  # type: ignore[method-assign]
    run.adapter.submit = dying("submit", run.adapter.submit)  # type: ignore[method-assign]
    run.adapter.prune = dying("prune", run.adapter.prune)  # type: ignore[method-assign]
    asyncio.run(run.start(num_epochs=4))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
