"""The demo, from nothing to a trained agent: through the same doors as any other run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config.import_path import import_object, make_importable
from etude.config.load import load_config
from etude.config.schema import Config
from etude.core.evaluation import EvalOutputItem
from etude.core.keys import generator
from etude.core.progress import Progress
from etude.demo.examples import copy_example
from etude.demo.words import episode_in_words
from etude.evaluation.evaluate import engine_of, measure, wanted_version, write_result
from etude.evaluation.result import Evaluation
from etude.export.model import export_model
from etude.finetune import finetune
from etude.report.run_report import PLOT
from etude.rollout.archive import read_episode
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from etude.stored.new_run import new_run
from etude.stored.phases import EVALUATION
from etude.stored.request import EvaluationRequest
from etude.stored.versions import BEST, choose_version

BEFORE, TRAINING, AFTER = "before", "training", "after"
"""Names of the demo's runs."""

GREEDY = "greedy"
"""The phase of episodes at temperature 0."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Shown:
    """An example with the agent's episode before training and after, in words."""

    example: str
    before: list[str]
    after: list[str]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What came of the demo."""

    folder: Path
    training: Path
    """The run folder of the training."""
    before: Evaluation
    after: Evaluation
    greedy: Evaluation
    """After training, at temperature 0."""
    shown: list[Shown]
    plot: Path
    model: Path
    """The trained model, as a folder that `transformers` loads."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "folder": str(self.folder),
            "training": str(self.training),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "greedy": self.greedy.as_json(),
            "episodes": [
                {"example": one.example, "before": one.before, "after": one.after} for one in self.shown
            ],
            "plot": str(self.plot),
            "model": str(self.model),
            "seconds": self.seconds,
        }


async def run_demo(task: str, method: str, seed: int, folder: Path, progress: Progress) -> DemoReport:
    """Make a base model, measure it, train it, measure it again on the same held-out examples.

    Everything is written into `folder` (absolute; empty or not there): the example's files, the base
    model, three runs, the trained model. Raises RequestError when that cannot be, and another
    EtudeError when the work failed.
    """
    started = time.monotonic()
    copy_example(task, folder)
    await _make_base(folder, seed, progress)
    config = demo_config(folder, method, seed)
    before = await _measure(config, BEFORE, EvaluationRequest(), progress)
    with new_run(config, TRAINING) as run:
        await finetune(config, run, progress=progress)
    version = choose_version(run.path, BEST)
    request = EvaluationRequest(run=str(run.path), version=version.number)
    after = await _measure(config, AFTER, request, progress)
    model = folder / "model"
    await asyncio.to_thread(export_model, version, model)
    return DemoReport(
        folder=folder,
        training=run.path,
        before=before[EVALUATION],
        after=after[EVALUATION],
        greedy=after[GREEDY],
        shown=_shown(run.path.parent, before[EVALUATION], after[EVALUATION], seed),
        plot=run.path / PLOT,
        model=model,
        seconds=time.monotonic() - started,
    )


def demo_config(folder: Path, method: str, seed: int) -> Config:
    """The example's config for a method, with its runs beside it."""
    return load_config(
        folder / "config.yml",
        [
            ("finetuning.trajectory_builder", method),
            ("finetuning.seed", str(seed)),
            ("finetuning.output_dir", _quoted(folder / "runs")),
        ],
    )


async def _make_base(folder: Path, seed: int, progress: Progress) -> None:
    """Have the example make its base model and its examples."""
    make_importable(folder)
    build_base: Callable[..., Awaitable[Any]] = import_object("base:build_base")
    progress.message("making a base model: small, from scratch, warmed up until it speaks the format")

    def checked(what: str, value: float) -> None:
        progress.phase(f"warming up: {what}")
        progress.scored(EvalOutputItem(id="warm-up", score=value))

    await build_base(folder / "base", seed, checked)


async def _measure(
    config: Config, name: str, request: EvaluationRequest, progress: Progress
) -> dict[str, Evaluation]:
    """The evaluation of the base model, or of the version that the request names; then also greedy."""
    phases = {EVALUATION: False} | ({GREEDY: True} if request.run is not None else {})
    wanted = wanted_version(request)
    async with AsyncExitStack() as exits:
        run = exits.enter_context(new_run(config, name, request))
        engines = {}
        if wanted is not None:
            engine = engines[str(config.finetuning.target_model)] = await engine_of(config, wanted)
            exits.push_async_callback(engine.close)
        runtime = await exits.enter_async_context(
            open_runtime(config, run, progress=progress, engines=engines)
        )
        model = "base" if wanted is None else str(wanted)
        found = {
            phase: await measure(
                runtime, runtime.validation_examples, model=model, phase=phase, greedy=greedy
            )
            for phase, greedy in phases.items()
        }
        write_result(found[EVALUATION], config, run)
    return found


def _shown(runs: Path, before: Evaluation, after: Evaluation, seed: int) -> list[Shown]:
    """Three examples, and first of all those that went wrong before and right after."""
    scores = [_scores(evaluation) for evaluation in (before, after)]
    names = [name for name in scores[0] if name in scores[1]]
    generator(seed, "shown").shuffle(names)
    names.sort(key=lambda name: -((scores[1][name] or 0.0) - (scores[0][name] or 0.0)))
    chosen = names[:_SHOWN]
    told = [_told(runs / run, chosen, of_run) for run, of_run in zip((BEFORE, AFTER), scores, strict=True)]
    return [Shown(name, first, second) for name, first, second in zip(chosen, *told, strict=True)]


def _told(run: Path, names: Sequence[str], scores: dict[str, float | None]) -> list[list[str]]:
    with RunFolder.read(run) as folder:
        records = [read_episode(folder.journal, f"{EVALUATION}/{name}/0") for name in names]
    return [
        episode_in_words(record, scores[name]) if record is not None else []
        for name, record in zip(names, records, strict=True)
    ]


def _scores(evaluation: Evaluation) -> dict[str, float | None]:
    items = evaluation.output.results_of(str(evaluation.reward))
    return {item.id: item.score if item.is_scored else None for item in items}


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)
