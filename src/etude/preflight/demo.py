"""The demo: a tiny model is made, learns a task, and is measured before and after.

It uses the functions that any run uses.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.config.import_path import import_object, make_importable
from etude.config.load import load_config
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.engines.local import require_local_extra
from etude.loop.evaluation import EvaluationScores, load_version_engine, measure
from etude.models.source import PACKAGED, locate, packaged_folder
from etude.preflight.starter import write_starter
from etude.runtime import open_runtime
from etude.show.exported_model import export_model
from etude.show.metrics_files import PLOT
from etude.show.turns import episode_transcript
from etude.store.facts import LAST, choose_version
from etude.store.files import write_new_files
from etude.store.histories import read_histories
from etude.store.run_folder import RunFolder
from etude.verbs import new_run, train_in

_PACKAGE = Path(__file__).parents[1]

TASKS = {
    "calculator": "learns to use a calculator: a question, a tool call, the result, the answer",
    "tictactoe": "learns tic-tac-toe against a random opponent; a random player who knows the rules gets 0.5",
    "sort": "learns to sort letters",
    "extraction": "learns to read notes about orders into the fields of a schema",
}
"""The tasks of a tiny model, each as the end of a sentence. The example with its name has its code."""

PRETRAINED = "tickets"
"""The task of a pretrained model: the project that `etude init --task` writes under this name."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a demo. Scores have the form of `EvaluationScores.as_json`, on all held-out examples."""

    folder: Path
    run: Path
    """The run folder of the training."""
    before: dict[str, Any]
    demonstrated: dict[str, Any] | None
    """After a warm-up on demonstrations, if the training begins with one."""
    after: dict[str, Any]
    greedy: dict[str, Any]
    """After training, at temperature 0."""
    transcripts: dict[str, str]
    """Before and after training, as YAML: the episodes of the example whose reward rose most."""
    plot: Path
    model: Path
    """The trained model, as a folder that `transformers` loads."""
    seconds: float


async def run_demo(
    name: str, seed: int, folder: Path, progress: Progress, training_overrides: Sequence[str] = ()
) -> DemoReport:
    """Write a project with its model into `folder` (absolute; empty or new), train it, and measure it before
    and after on the same examples. Raises RequestError if this is impossible, and another EtudeError if the
    work fails."""
    started = time.monotonic()
    require_local_extra()
    if name == PRETRAINED:
        # If `make real-model` has made it, the hub is not asked.
        source = str(packaged_folder()) if packaged_folder().is_dir() else PACKAGED
        locate(source)
        write_starter(folder, PRETRAINED, source)
    else:
        copy_example(name, folder)
        await _make_base(folder, seed, progress)
    output_dir = json.dumps(str(folder / "runs"), ensure_ascii=False)
    overrides = [f"finetuning.seed={seed}", f"finetuning.output_dir={output_dir}"]
    config = load_config(folder / "config.yml", overrides)
    with new_run(config, "training") as run:
        await train_in(
            load_config(folder / "config.yml", [*overrides, *training_overrides]), run, progress=progress
        )
        trained = choose_version(run.path, LAST)
        validations = read_histories(run.journal)[None].validations
        phases = ["warm-up/0"] if config.finetuning.warm_up else []
        phases += [f"validation/{epoch}" for epoch in (validations[0].epoch, validations[-1].epoch)]
        policy = str(config.finetuning.target_model)
        async with AsyncExitStack() as exits:
            engine = await load_version_engine(config, policy, trained)
            exits.push_async_callback(engine.close)
            runtime = await exits.enter_async_context(
                open_runtime(config, run, progress=progress, engines={policy: engine})
            )
            # Training measured these already, so they are only read back.
            quiet, examples = replace(runtime, progress=Progress()), runtime.validation_examples
            before, *between, after = [
                await measure(quiet, examples, model=str(trained), phase=phase) for phase in phases
            ]
            greedy = await measure(runtime, examples, model=str(trained), phase="greedy", greedy=True)
        transcripts = _transcripts(run, (phases[0], phases[-1]), before, after)
    model = folder / "model"
    await asyncio.to_thread(export_model, trained, model)
    return DemoReport(
        folder=folder,
        run=run.path,
        before=before.as_json(),
        demonstrated=between[0].as_json() if between else None,
        after=after.as_json(),
        greedy=greedy.as_json(),
        transcripts=transcripts,
        plot=run.path / PLOT,
        model=model,
        seconds=time.monotonic() - started,
    )


def examples_folder() -> Path:
    """Return the folder with an example for each task, installed or in a checkout. Raises RequestError."""
    # A wheel has them inside the package; a checkout has them next to `src`.
    for folder in (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise RequestError("the examples are not part of this installation; install etude again")


def copy_example(task: str, folder: Path) -> None:
    """Copy an example's code, config and README into a new folder. Raises RequestError or StoreError."""
    source = examples_folder() / task
    if not source.is_dir():
        raise RequestError(f"there is no example '{task}' in {source.parent}; install etude again")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} already exists and is not empty; name another folder with --out")
    shared = examples_folder() / "warm_up.py"  # It makes the tiny models of all examples.
    files = sorted(file for file in (*source.iterdir(), shared) if file.is_file())
    write_new_files(folder, {file.name: file.read_text(encoding="utf-8") for file in files})


async def _make_base(folder: Path, seed: int, progress: Progress) -> None:
    """Let the example make its base model and its examples."""
    make_importable(folder)
    progress.message("making a base model from scratch, and warming it up until it speaks the format")

    def report_check(what: str, value: float) -> None:
        progress.phase(f"warming up: {what}")
        progress.scored(EvalOutputItem(id="warm-up", score=value))

    await import_object("base:build_base")(folder / "base", seed, report_check)


def _transcripts(
    run: RunFolder, phases: tuple[str, str], before: EvaluationScores, after: EvaluationScores
) -> dict[str, str]:
    """Return the transcripts, before and after training, of the example whose reward rose most."""
    earlier, later = (
        {item.id: item.score or 0.0 for item in each.output.evaluator_items(str(each.reward))}
        for each in (before, after)
    )
    name = max(earlier.keys() & later.keys(), key=lambda name: (later[name] - earlier[name], name))
    return {
        when: episode_transcript(run, f"{phase}/{name}/0")
        for when, phase in zip(("before", "after"), phases, strict=True)
    }
