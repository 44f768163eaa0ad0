"""The demo, from nothing to a trained agent: through the same doors as any other run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.config.document import Override
from etude.config.import_path import import_object, make_importable
from etude.config.load import load_config
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.demo.report import DemoReport, Variant, shown_episodes
from etude.export.model import export_model
from etude.inference.local import require_local_extra
from etude.loop.evaluation import Evaluation, engine_of, measure
from etude.loop.lifecycle import new_run
from etude.report.files import PLOT
from etude.runtime import Runtime, open_runtime
from etude.store.files import write_new_files
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.store.versions import LAST, RunVersion, choose_version
from etude.verbs import train_in

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Task:
    """Something to learn."""

    introduction: str
    """Goes on after `A tiny model …`."""
    variants: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Other circumstances to measure the agent in, as overrides of the config, by what they are called."""


TASKS = {
    "calculator": Task("learns to use a calculator: a question, a tool call, the result, the answer"),
    "tictactoe": Task(
        "learns tic-tac-toe against a random opponent; a random player who knows the rules gets 0.5",
        {"against an optimal opponent": (("workflow.arguments.opponent", "optimal"),)},
    ),
    "sort": Task("learns to sort letters"),
    "extraction": Task("learns to read notes about orders into the fields of a schema"),
}
"""The example of the same name has the code and config of each."""


async def run_demo(
    name: str,
    method: str,
    seed: int,
    folder: Path,
    progress: Progress,
    training_overrides: Sequence[Override] = (),
) -> DemoReport:
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
    with new_run(config, "training") as run:
        training = demo_config(folder, method, seed, training_overrides)
        await train_in(training, run, progress=progress)
        trained = choose_version(run.path, LAST)
        validations = EpochLog(run.journal).history(run.name).validations
        phases = (f"validation/{validations[0].epoch}", f"validation/{validations[-1].epoch}")
        async with runtime_of(config, run, trained, progress) as runtime:
            # Both were measured while training, and are only read back.
            quiet = replace(runtime, progress=Progress())
            before, after = [await measured(quiet, str(trained), phase) for phase in phases]
            greedy = await measured(runtime, str(trained), "greedy", greedy=True)
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


def examples_folder() -> Path:
    """The folder with an example for each task: in the installed package, or in the checkout.

    Raises RequestError when there is none.
    """
    # In a wheel they are part of the package; in a checkout they lie beside `src`.
    for folder in (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise RequestError("the examples are not part of this installation; install etude again")


def copy_example(task: str, folder: Path) -> None:
    """Copy an example's code, config and README into a new folder.

    Raises RequestError for an unknown task, or when the folder has files in it, StoreError when it
    cannot be written.
    """
    source = examples_folder() / task
    if not source.is_dir():
        raise RequestError(f"there is no example '{task}' in {source.parent}; install etude again")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} is there already and not empty; name another folder with --out")
    files = sorted(file for file in source.iterdir() if file.is_file())
    write_new_files(folder, {file.name: file.read_text(encoding="utf-8") for file in files})


def demo_config(folder: Path, method: str, seed: int, overrides: Iterable[Override] = ()) -> Config:
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


async def _measure_variant(
    name: str, config: Config, trained: RunVersion, progress: Progress
) -> list[dict[str, Any]]:
    """The evaluations of the base model and the trained one in other circumstances."""
    evaluations = []
    with new_run(config, name.replace(" ", "-")) as run:
        for version, phase in ((RunVersion(trained.run, None), "before"), (trained, "after")):
            async with runtime_of(config, run, version, progress) as runtime:
                evaluations.append((await measured(runtime, str(version), phase)).as_json())
    return evaluations


async def measured(runtime: Runtime, model: str, phase: str, *, greedy: bool = False) -> Evaluation:
    """The agent on all held-out examples; a phase that was measured already is only read back."""
    return await measure(runtime, runtime.validation_examples, model=model, phase=phase, greedy=greedy)


@asynccontextmanager
async def runtime_of(
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
