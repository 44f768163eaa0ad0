"""A run of two models that kills itself: `python -m tests.crashing_targets FOLDER now|ahead [PLACE COUNT]`.

PLACE is where the process gets kill -9 when it comes there for the COUNT-th time, whichever model it is
about: `request`, `submit`, `wait`, `adopt`, `prune` or `never`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests import several, training
from tests.killing import Killer
from tests.several import Several, config


def main(folder: Path, mode: str, place: str = "never", count: str = "0") -> None:
    run = Several(folder / "run")
    dying = Killer(place, count).at

    for name in run.engines:
        engine = training.learning_engine(log=folder / f"sampled-{name}.log", base=30 + 5 * len(name))
        engine.complete = dying("request", engine.complete)  # type: ignore[method-assign]
        engine.adopt = dying("adopt", engine.adopt)  # type: ignore[method-assign]
        run.engines[name] = engine
    for method, at in (("submit", "submit"), ("wait_until_complete", "wait"), ("prune", "prune")):
        setattr(several.FakeAdapter, method, dying(at, getattr(several.FakeAdapter, method)))
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1}
    settings = config(
        num_epochs=4,
        prover={"every": 2, "curriculum_learning": curriculum},
        trainer_adapters={"backend": {"_type": "test_several", "lose_jobs": True}},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": 1}},
        finetuning={
            "collect_ahead": mode == "ahead",
            "run_configuration": {
                "validation_dataset": {"_type": "test_counted", "prefix": "v"},
                "validation_interval": 2,
            },
        },
    )
    asyncio.run(run.start(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
