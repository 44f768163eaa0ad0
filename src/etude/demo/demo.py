"""The demo, from nothing to a trained agent: through the same doors as any other run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.config.import_path import import_object, make_importable
from etude.config.load import load_config
from etude.config.schema import Config
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.demo.report import DemoReport, Variant, shown_episodes
from etude.demo.tasks import TASKS, copy_example
from etude.export.model import export_model
from etude.inference.local import require_local_extra
from etude.loop.evaluation import Evaluation, engine_of, measure
from etude.loop.lifecycle import new_run
from etude.report.files import PLOT
from etude.runtime import Runtime, open_runtime
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.store.versions import LAST, RunVersion, choose_version
from etude.verbs import train_in

RUN = "training"
"""Name of the demo's run."""

GREEDY = "greedy"
"""The phase of episodes at temperature 0."""


async def run_demo(name: str, method: str, seed: int, folder: Path, progress: Progress) -> DemoReport:
    """Make a base model, measure it, train it, measure it again on the same held-out examples.

    Everything is written into `folder` (absolute; empty or not there): the example's files, the base
    model, the run, the trained model. Raises RequestError when that cannot be, and another EtudeError
    when the work failed.
    """
    started, task = time.monotonic(), TASKS[name]
    require_local_extra()
    copy_example(name, folder)
    await _make_base(folder, seed, progress)
    config = demo_config(folder, method, seed)
    with new_run(config, RUN) as run:
        await train_in(config, run, progress=progress)
        trained = choose_version(run.path, LAST)
        phases = _phases(run)
        async with _runtime_of(config, run, trained, progress) as runtime:
            # Both were measured while training, and are only read back.
            quiet = replace(runtime, progress=Progress())
            before, after = [await _measure(quiet, str(trained), phase) for phase in phases]
            greedy = await _measure(runtime, str(trained), GREEDY, greedy=True)
        episodes = shown_episodes(run.journal, phases, before, after, seed)
    variants = []
    for title, overrides in task.variants.items():
        changed = demo_config(folder, method, seed, overrides)
        variants.append(Variant(title, *await _measure_variant(title, changed, trained, progress)))
    model = folder / "model"
    await asyncio.to_thread(export_model, trained, model)
    return DemoReport(
        folder=folder,
        run=run.path,
        before=before.as_json(),
        after=after.as_json(),
        greedy=greedy.as_json(),
        variants=variants,
        episodes=episodes,
        plot=run.path / PLOT,
        model=model,
        seconds=time.monotonic() - started,
    )


def demo_config(folder: Path, method: str, seed: int, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """The example's config for a method, with its runs beside it."""
    output_dir = json.dumps(str(folder / "runs"), ensure_ascii=False)
    own = [("trajectory_builder", method), ("seed", str(seed)), ("output_dir", output_dir)]
    changes = [(f"finetuning.{key}", value) for key, value in own]
    return load_config(folder / "config.yml", [*changes, *overrides])


async def _make_base(folder: Path, seed: int, progress: Progress) -> None:
    """Have the example make its base model and its examples."""
    make_importable(folder)
    build_base: Callable[..., Awaitable[Any]] = import_object("base:build_base")
    progress.message("making a base model from scratch, and warming it up until it speaks the format")

    def checked(what: str, value: float) -> None:
        progress.phase(f"warming up: {what}")
        progress.scored(EvalOutputItem(id="warm-up", score=value))

    await build_base(folder / "base", seed, checked)


def _phases(run: RunFolder) -> tuple[str, str]:
    """The validations before training and after."""
    validations = EpochLog(run.journal).history(run.name).validations
    return f"validation/{validations[0].epoch}", f"validation/{validations[-1].epoch}"


async def _measure_variant(
    name: str, config: Config, trained: RunVersion, progress: Progress
) -> list[dict[str, Any]]:
    """The evaluations of the base model and the trained one in other circumstances."""
    evaluations = []
    with new_run(config, name.replace(" ", "-")) as run:
        for version, phase in ((RunVersion(trained.run, None), "before"), (trained, "after")):
            async with _runtime_of(config, run, version, progress) as runtime:
                evaluations.append((await _measure(runtime, str(version), phase)).as_json())
    return evaluations


async def _measure(runtime: Runtime, model: str, phase: str, *, greedy: bool = False) -> Evaluation:
    return await measure(runtime, runtime.validation_examples, model=model, phase=phase, greedy=greedy)


@asynccontextmanager
async def _runtime_of(
    config: Config, run: RunFolder, version: RunVersion, progress: Progress
) -> AsyncIterator[Runtime]:
    """A runtime whose agent samples from a version of the trained model."""
    model = str(config.finetuning.target_model)
    engine = await engine_of(config, model, version)
    try:
        async with open_runtime(config, run, progress=progress, engines={model: engine}) as runtime:
            yield runtime
    finally:
        await engine.close()
