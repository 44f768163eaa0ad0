"""A training run that kills itself: `python -m tests.crashing_run FOLDER now|ahead [PLACE COUNT]`.

`ahead` collects for the next epoch while a job trains, which takes a moment then.

PLACE is where the process gets kill -9 when it comes there for the COUNT-th time: `request`, `submit`,
`wait`, `adopt`, `prune` or `never`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from etude.config.finetuning import CurriculumLearningConfig, FinetuneRunConfig
from etude.core.job import TrainingJobStatus
from tests.killing import Killer
from tests.training import FakeAdapter, Run, examples, learning_engine


async def after_a_moment(status: TrainingJobStatus) -> TrainingJobStatus:
    await asyncio.sleep(0.05)
    return status


def main(folder: Path, mode: str, place: str = "never", count: str = "0") -> None:
    run = Run(folder / "run", keep_checkpoints=1)
    run.engine = learning_engine(log=folder / "sampled.log")
    run.adapter = FakeAdapter(folder / "backend", lose_jobs=True)
    run.examples, run.validation = examples(4), examples(6, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=2)
    run.finetuning.curriculum_learning = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.5, increment_percentile=0.25, expansion_interval=1
    )
    if mode == "ahead":
        run.finetuning.collect_ahead = True
        run.adapter.behave = after_a_moment
    dying = Killer(place, count).at

    run.engine.complete = dying("request", run.engine.complete)  # type: ignore[method-assign]
    run.engine.adopt = dying("adopt", run.engine.adopt)  # type: ignore[method-assign]
    run.adapter.submit = dying("submit", run.adapter.submit)  # type: ignore[method-assign]
    run.adapter.wait_until_complete = dying("wait", run.adapter.wait_until_complete)  # type: ignore[method-assign]
    run.adapter.prune = dying("prune", run.adapter.prune)  # type: ignore[method-assign]
    asyncio.run(run.start(num_epochs=4))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
