"""The verbs: train, evaluate, resume. The command line calls the same functions.

Each is a coroutine function (`train_async`), and a function that waits for it (`train`), also in a notebook
cell and in a running event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from etude.backup.address import is_address
from etude.backup.copies import fetch
from etude.config.document import Override
from etude.config.schema import Config
from etude.core.errors import RequestError, TrainingError
from etude.core.history import History
from etude.core.interfaces import Engine, Progress
from etude.core.job import TrainingStatusEnum
from etude.core.process import collected_rarely
from etude.loop.arguments import config_of, is_config, load, refuse, with_live
from etude.loop.evaluation import Evaluation
from etude.loop.evaluation import evaluate as run_evaluation
from etude.loop.lifecycle import (
    config_to_resume,
    new_run,
    note_changes,
    retry_failed,
    storage_options,
    storage_overrides,
)
from etude.loop.model import model_overrides
from etude.loop.settings import as_overrides
from etude.loop.targets import assemble_trainer
from etude.report.files import RunReport
from etude.report.progress import progress_for
from etude.run import Run, TrainedModel
from etude.runtime import Report, open_runtime
from etude.store.facts import find_run
from etude.store.run_folder import RunFolder
from etude.store.stored_config import EvaluationRequest, model_config, read_request
from etude.store.versions import RunVersion, run_version
from etude.trackers.reporting import Reporting, with_trackers

P = ParamSpec("P")
T = TypeVar("T")


async def train_async(
    agent: Any,
    *,
    reward: Any = None,
    examples: Any = None,
    validation: Any = None,
    model: Any = None,
    models: Mapping[str, Any] | None = None,
    targets: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    algorithm: Any = None,
    backend: Any = None,
    trainer: Any = None,
    tools: Any = None,
    scenario: Any = None,
    report: Any = None,
    name: str | None = None,
    overrides: Iterable[str] = (),
    progress: Progress | bool = True,
    **settings: Any,
) -> Run:
    """Train the models of an agent, and return the run.

    Args:
        agent: A function of an example and an episode, decorated or plain; an import path; a workflow of a
            config; a protocol, with its `scenario`. Or a whole config (a file, a dict, a Config), which then
            has everything but `report`, `name`, `overrides`, `progress` and settings.
        reward: A function of an example and an output, an Evaluator, or several by name: all of them are
            measured, and the first is trained on, unless `targets` name theirs.
        examples: A list of dicts or Examples, a data frame, a dataset, or a file.
        validation: Held-out examples, in the same forms.
        model: A name on the Hugging Face hub, a folder, or an entry of `llms` as a dict or config.
        models: Several models by name, in the same forms.
        targets: Which of them are trained: their names, or for each of these `reward`, `algorithm`, `backend`
            and the keys of `finetuning.targets`.
        algorithm: An instance of a TrajectoryBuilderConfig, such as `etude.Grpo(group=8)`, a name, or a dict.
        backend: Where to train: a TrainerAdapterConfig, a name, or a dict; by default in this process.
        trainer: The loop, in the same forms; by default `epochs`.
        tools: Tools of `episode.tools`: Python functions, or several sets by name, each of functions or as in
            a config's `tools`.
        report: Where the run is shown: `"wandb"`, a function that is called with each `etude.RunRecord`, an
            entry of a config's `report`, or a list of these.
        name: The name of the run; made up by default.
        overrides: `key.of.the.config=value`, as for `-o` of the command line.
        progress: False for silence; a Progress of one's own.
        settings: Keys of `finetuning` (`epochs` is short for `num_epochs`), its `run_configuration`,
            `eval.general` and the trainer `epochs`: `seed`, `output_dir`, `validation_interval`, `patience`…;
            and `budget`, such as `{"usd": 5}`, at a limit of which BudgetReached is raised.

    Raises RequestError when that cannot be done (nothing was sampled by then), and another EtudeError when
    the work failed. What was done is kept: `etude.resume(run)` goes on.
    """
    parts = {"reward": reward, "examples": examples, "validation": validation, "model": model}
    parts |= {"models": models, "targets": targets, "algorithm": algorithm, "backend": backend}
    parts |= {"trainer": trainer, "tools": tools, "scenario": scenario}
    config = with_trackers(config_of(agent, parts, overrides, settings, enabled=True), report)
    with new_run(config, name) as run:
        return await train_in(config, run, progress=progress)


async def evaluate_async(
    agent: Any,
    *,
    reward: Any = None,
    examples: Any = None,
    model: Any = None,
    models: Mapping[str, Any] | None = None,
    tools: Any = None,
    scenario: Any = None,
    report: Any = None,
    repeat: int = 1,
    greedy: bool = False,
    name: str | None = None,
    overrides: Iterable[str] = (),
    progress: Progress | bool = True,
    **settings: Any,
) -> Run:
    """Run an agent on examples and score it, with the same code as in training; the run, with its `scores`.

    The arguments are those of `train`. `model` may also be a trained one, `run.model` or `"RUN:best"`; with a
    whole config it takes the place of the config's own. `repeat` episodes are run on each example, `greedy`
    ones at temperature 0.
    """
    root = Path(settings.get("output_dir", "runs"))
    if is_config(agent):
        given = {"reward": reward, "examples": examples, "models": models, "tools": tools}
        refuse(given | {"scenario": scenario})
        changes = [*overrides, *as_overrides(settings)]
        config, request, _ = request_of(agent, changes, model, root, repeat=repeat, greedy=greedy)
    else:
        version = _version_of(model, root)
        if version is not None:
            trained = model_config(version.run, version.target)
            model = trained.llms[str(trained.finetuning.target_model)]
        parts = {"reward": reward, "examples": examples, "model": model, "models": models}
        parts |= {"tools": tools, "scenario": scenario}
        config = config_of(agent, parts, overrides, settings, enabled=False).for_evaluation()
        request = _request(version, repeat, greedy)
    config = with_trackers(config, report)
    with new_run(config, name, request) as run, _shown(progress) as display:
        await evaluate_in(config, run, request, progress=display)
    return Run(run.path)


async def resume_async(
    run: Run | str | Path,
    *,
    agent: Any = None,
    reward: Any = None,
    examples: Any = None,
    validation: Any = None,
    tools: Any = None,
    report: Any = None,
    retry: bool = False,
    output_dir: str | Path = "runs",
    overrides: Iterable[str] = (),
    progress: Progress | bool = True,
    **settings: Any,
) -> Run:
    """Go on with a run that was stopped, without repeating anything that it has done.

    A run that began with Python objects of a program, which its config cannot name, is given the same ones
    again: `agent`, `reward`, `examples`, `validation`, `tools`; `report` may be others. `retry` tries again
    what failed without the agent's fault. Settings may change how it goes on: `epochs=20` trains a finished
    run for longer. Raises RequestError for those that would make another run of it. The address of a run's
    backup (`s3://bucket/etude/RUN`) stands for the folder that is made of it in `output_dir`.
    """
    changes = [*overrides, *as_overrides(settings)]
    if isinstance(run, str) and is_address(run):
        restored = await asyncio.to_thread(fetch, run, Path(output_dir), storage_options(changes))
        changes += storage_overrides(restored.run, run)
        run = restored.run
        with _shown(progress) as display:
            for line in restored.lines():
                display.message(line)
    path = run.folder if isinstance(run, Run) else find_run(str(run), Path(output_dir))
    config = config_to_resume(path, changes)
    config = with_live(
        config, agent=agent, reward=reward, examples=examples, validation=validation, tools=tools
    )
    config = with_trackers(config, report)
    request = read_request(path)
    with RunFolder.open(path) as folder:
        note_changes(folder, config)
        if retry:
            await retry_failed(folder)
        if request is None:
            return await train_in(config, folder, progress=progress)
        with _shown(progress) as display:
            await evaluate_in(config, folder, request, progress=display)
    return Run(path)


def load_run(run: str | Path, *, output_dir: str | Path = "runs") -> Run:
    """A stored run: by its folder, or its name in `output_dir`. Raises RequestError when there is none."""
    return Run(find_run(str(run), Path(output_dir)))


async def train_in(
    config: Config,
    run: RunFolder,
    *,
    progress: Progress | bool = False,
    report: Report | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> Run:
    """Train as the config says, or go on with what the open run folder has of it already.

    `report` writes the run's files, by default all of them; `engines` take the place of entries of `llms`.
    """
    if not config.finetuning.enabled:
        raise RequestError("finetuning is not enabled in this config; set 'finetuning.enabled: true'")
    with collected_rarely(), _shown(progress) as display:
        write, reporting = report or RunReport(tell=display.message), Reporting(config, run, display)

        def tell(history: History, folder: Path, final: bool) -> None:
            write(history, folder, final)
            reporting.wake()

        async with (
            open_runtime(config, run, progress=display, report=tell, engines=engines) as runtime,
            reporting,
        ):
            trainer = await assemble_trainer(runtime)
            try:
                await trainer.initialize(run_config=config.finetuning)
                statuses = await trainer.run(config.finetuning.num_epochs)
            finally:
                await trainer.cleanup()
    # A trainer that somebody else wrote may return failures instead of raising them.
    if not statuses:
        raise TrainingError("the run trained on nothing: the trainer returned no training job")
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            message = f": {status.message}" if status.message else ""
            raise TrainingError(f"job {status.run_id} ({status.backend}) ended as '{status.status}'{message}")
    return Run(run.path)


async def evaluate_in(
    config: Config, run: RunFolder, request: EvaluationRequest, *, progress: Progress
) -> Evaluation:
    """Evaluate as the config says, or go on with what the open run folder has of it already."""
    with collected_rarely():
        async with Reporting(config, run, progress):
            return await run_evaluation(config, run, request, progress=progress)


def request_of(
    source: Any, overrides: Iterable[Override], model: Any, root: Path, *, repeat: int, greedy: bool
) -> tuple[Config, EvaluationRequest, RunVersion | None]:
    """A config with `model` in place of its own, the request to evaluate it, and which version it is."""
    changes: list[Override] = [*overrides]
    config, version = load(source, changes), _version_of(model, root)
    if model is not None:
        config = load(source, [*changes, *model_overrides(config, str(model), version)])
    return config.for_evaluation(), _request(version, repeat, greedy), version


def _request(version: RunVersion | None, repeat: int, greedy: bool) -> EvaluationRequest:
    which: dict[str, Any] = {}
    if version is not None:
        which = {"run": str(version.run), "version": version.number, "target": version.target}
    return EvaluationRequest(repeat=repeat, greedy=greedy, **which)


def _version_of(model: Any, root: Path) -> RunVersion | None:
    if isinstance(model, Run):
        model = model.model
    if isinstance(model, TrainedModel):
        return model.chosen
    return run_version(model, root) if isinstance(model, str) else None


def _shown(progress: Progress | bool) -> AbstractContextManager[Progress]:
    if isinstance(progress, bool):
        return progress_for() if progress else Progress()
    return nullcontext(progress)


def blocking(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The coroutine function as a function that waits: where an event loop runs, in a thread of its own."""

    @functools.wraps(work)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work(*args, **kwargs))
        return _in_a_thread(work(*args, **kwargs))

    return wait


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs in another thread. Ctrl-C cancels it, and waits for its end."""
    waiting = asyncio.current_task()
    tasks: list[asyncio.Task[T]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
        tasks.append(task)
        return await task

    def cancel() -> None:
        while tasks:
            task = tasks.pop()
            task.get_loop().call_soon_threadsafe(task.cancel)

    with ThreadPoolExecutor(1, thread_name_prefix="etude") as executor:
        future = executor.submit(contextvars.copy_context().run, asyncio.run, main())
        try:
            while not futures.wait([future], 0.2).done:
                # `asyncio.run` makes a first Ctrl-C a cancellation, which this thread would notice too late.
                if waiting is not None and waiting.cancelling():
                    cancel()
        except KeyboardInterrupt:
            cancel()
            raise
    return future.result()


train = blocking(train_async)
evaluate = blocking(evaluate_async)
resume = blocking(resume_async)
