"""The demo with a pretrained model, which imitates demonstrations and then learns from its own attempts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.config.document import Override
from etude.config.load import load_config
from etude.core.interfaces import Progress
from etude.demo.demo import measured, runtime_of
from etude.demo.report import Shown, shown_episodes
from etude.export.model import export_model
from etude.inference.local import require_local_extra
from etude.loop.lifecycle import new_run
from etude.models.source import locate, packaged_folder
from etude.preflight.starter import MODEL, write_starter
from etude.report.files import PLOT
from etude.store.log import EpochLog
from etude.store.versions import BASE, LAST, WARM_UP, choose_version
from etude.verbs import train_in

TASK = "tickets"
"""Of `etude init --task`: the demo is that project."""
STAGES = {"base": BASE, "after demonstrations": WARM_UP, "after training": LAST}


@dataclass(frozen=True, slots=True)
class Stage:
    """The agent on all held-out examples, at a point of its training. As `Evaluation.as_json` has them."""

    name: str
    sampled: dict[str, Any]
    """At temperature 1."""
    greedy: dict[str, Any] | None
    """At temperature 0: of the base model and of the trained one."""


@dataclass(frozen=True, slots=True)
class RealReport:
    """The outcome of a demo with a pretrained model."""

    folder: Path
    run: Path
    stages: list[Stage]
    episodes: list[Shown]
    """Greedy, by the base model and by the trained one."""
    plot: Path
    model: Path
    """The trained model, as a folder that `transformers` loads."""
    seconds: float


async def run_real_demo(
    seed: int, folder: Path, progress: Progress, training_overrides: Sequence[Override] = ()
) -> RealReport:
    """Write the project, train it, and measure three versions of its model on the same held-out examples.

    Everything is written into `folder` (absolute; empty or not there). Raises RequestError when that cannot
    be, or when the model cannot be had, and another EtudeError when the work failed.
    """
    started = time.monotonic()
    require_local_extra()
    # Made by `make real-model`, it is taken without asking the hub.
    model = str(packaged_folder()) if packaged_folder().is_dir() else MODEL
    locate(model)
    write_starter(folder, TASK, model)
    own = [
        ("finetuning.seed", str(seed)),
        ("finetuning.output_dir", json.dumps(str(folder / "runs"), ensure_ascii=False)),
    ]
    config = load_config(folder / "config.yml", own)
    with new_run(config, "training") as run:
        training = load_config(folder / "config.yml", [*own, *training_overrides])
        await train_in(training, run, progress=progress)
        validations = EpochLog(run.journal).history(run.name).validations
        # All were measured while training, and are only read back.
        phases = ("warm-up/0", "validation/0", f"validation/{validations[-1].epoch}")
        stages, greedies = [], []
        for (name, wish), phase in zip(STAGES.items(), phases, strict=True):
            version = choose_version(run.path, wish)
            async with runtime_of(config, run, version, progress) as runtime:
                quiet = replace(runtime, progress=Progress())
                sampled = await measured(quiet, str(version), phase)
                if wish != WARM_UP:
                    greedies.append(await measured(runtime, str(version), f"greedy/{name}", greedy=True))
            greedy = None if wish == WARM_UP else greedies[-1].as_json()
            stages.append(Stage(name, sampled.as_json(), greedy))
        first, *_, last = (f"greedy/{name}" for name in STAGES)
        episodes = shown_episodes(run.journal, (first, last), greedies[0], greedies[-1], seed)
    exported = folder / "model"
    await asyncio.to_thread(export_model, version, exported)
    return RealReport(
        folder=folder,
        run=run.path,
        stages=stages,
        episodes=episodes,
        plot=run.path / PLOT,
        model=exported,
        seconds=time.monotonic() - started,
    )
