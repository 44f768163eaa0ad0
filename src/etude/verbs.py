"""The verbs train, evaluate and resume, which the command line calls too.

Each is a coroutine function (`train_async`) and a function that waits for it (`train`). The waiting one also
works in a notebook cell and while an event loop runs.
"""

import asyncio
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.document import Override
from etude.config.import_path import importing
from etude.config.load import parse_components, resolved_yaml
from etude.config.registry import OTHER_DATASETS
from etude.config.schema import Config
from etude.core.data_model import DataModel
from etude.core.errors import RequestError, TrainingError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.interfaces import Engine, Progress
from etude.core.job import TrainingStatusEnum
from etude.core.process import rare_garbage_collection
from etude.core.threads import blocking
from etude.loop.arguments import (
    build_config,
    for_evaluation,
    is_config,
    load,
    refuse,
    refuse_training,
    require_objects,
    settings_as_overrides,
    with_python_objects,
)
from etude.loop.evaluation import EvaluationScores, model_overrides
from etude.loop.evaluation import evaluate as run_evaluation
from etude.loop.lifecycle import config_to_resume, note_changes, restore, retry_failed
from etude.loop.recording_wrappers import assemble_trainer
from etude.run import Run, TrainedModel
from etude.runtime import Report, open_runtime
from etude.show.metrics_files import write_metrics
from etude.show.progress import progress_for
from etude.show.tracker import Reporting
from etude.show.tracker_services import LiveTrackerConfig, as_tracker
from etude.store.facts import RunVersion, find_run, run_version
from etude.store.run_folder import RunFolder, new_run_name
from etude.store.stored_config import EvaluationRequest, model_config, read_request

P = ParamSpec("P")
T = TypeVar("T")

_ARGUMENTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "output_dir": ((str, Path), "a folder"),
    "overrides": ((list, tuple), "a list of texts"),
    "models": ((Mapping, type(None)), "a dict of models by name"),
    "progress": ((bool, Progress), "True, False or a Progress"),
    "repeat": ((int,), "a whole number"),
    **dict.fromkeys(("retry", "greedy"), ((bool,), "True or False")),
}
"""The types of arguments that are not checked elsewhere, and how errors name them."""


def _check_arguments(verb: Callable[P, T]) -> Callable[P, T]:
    """Make a verb raise RequestError for an argument of a wrong type, and where it would wait for itself."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if (module := importing.module) is not None:
            name = verb.__name__.removesuffix("_async")
            raise RequestError(
                f"the module '{module}' is imported for its functions, and runs etude.{name}; put that call "
                "below `if __name__ == '__main__':`"
            )
        for name, (types, text) in _ARGUMENTS.items():
            if name in kwargs and not isinstance(kwargs[name], types):
                raise RequestError(f"{name} is {text}, found {kwargs[name]!r:.80}")
        return verb(*args, **kwargs)

    return call


@_check_arguments
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
        agent: A function of an example and an episode, decorated or plain; an import path; a config's
            workflow; or a protocol, with its `scenario`. It may also be a whole config: a file, a dict or a
            Config. Then only `report`, `name`, `overrides`, `progress` and settings may accompany it.
        reward: A function of an example and an output, an Evaluator, or a dict of several by name. All are
            measured, and the first one is trained on. With several, all `targets` name theirs.
        examples: A list of dicts or Examples, a data frame, a dataset, or a file.
        validation: Held-out examples, in the same forms.
        model: A name on the Hugging Face hub, a folder, or an entry of `llms` as a dict or config.
        models: Several models by name, in the same forms; for a protocol, under its agents' names.
        targets: The models to train: their names, or for each name a dict with `reward`, `algorithm`,
            `backend` and the keys of `finetuning.targets`.
        algorithm: An instance of a TrajectoryBuilderConfig, such as `etude.Grpo(group=8)`, a name, or a dict.
        backend: Where to train: a TrainerAdapterConfig, a name, or a dict. The default is this process.
        trainer: The loop, in the same forms. The default is `epochs`.
        tools: Tools for `episode.tools`: Python functions, or several sets by name. A set is a list of
            functions, or an entry as in a config's `tools`.
        report: Where to show the run: `"wandb"`, a function that is called with each `etude.RunRecord`, an
            entry of a config's `report`, or a list of these.
        name: The name of the run. The default is a new name.
        overrides: `key.of.the.config=value`, as for `-o` of the command line.
        progress: False for silence, or a custom Progress.
        settings: Keys of `finetuning` (`epochs` is short for `num_epochs`), its `run_configuration`,
            `eval.general` and the trainer `epochs`, such as `seed`, `output_dir` and `patience`. Also
            `budget`, such as `{"usd": 5}`: at its limit, BudgetReached is raised.

    Raises RequestError if the request cannot be met, before anything is sampled. Raises another EtudeError if
    the work fails. Finished work is kept, and `etude.resume(run)` continues from it.
    """
    parts = {"reward": reward, "examples": examples, "validation": validation, "model": model}
    parts |= {"models": models, "targets": targets, "algorithm": algorithm, "backend": backend}
    parts |= {"trainer": trainer, "tools": tools, "scenario": scenario}
    config = _with_trackers(build_config(agent, parts, overrides, settings, enabled=True), report)
    with new_run(config, name) as run:
        return await train_in(config, run, progress=progress)


@_check_arguments
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
    """Run an agent on examples and score it, with the code that training uses. The run has the `scores`.

    The arguments are those that `train` takes. `model` may also be a trained model, `run.model` or
    `"RUN:best"`. With a whole config it replaces the config's model. Each example gets `repeat` episodes.
    With `greedy` they are sampled at temperature 0.
    """
    refuse_training(settings)
    root = Path(settings["output_dir"]) if "output_dir" in settings else None
    if is_config(agent):
        given = {"reward": reward, "examples": examples, "models": models, "tools": tools}
        refuse(given | {"scenario": scenario})
        of_settings = settings_as_overrides(settings, lambda: load(agent, overrides).finetuning.trainer)
        config, request, _ = request_for(
            agent, [*overrides, *of_settings], model, root, repeat=repeat, greedy=greedy
        )
    else:
        version = _trained_version(model, root or Path("runs"))
        if version is not None:
            trained = model_config(version.run, version.target)
            target = str(trained.finetuning.target_model)
            # The agent calls it by this name, and other models may be beside it.
            model, models = None, {**(models or {}), target: trained.llms[target]}
            settings = {"target_model": target, **settings}
        parts = {"reward": reward, "examples": examples, "model": model, "models": models}
        parts |= {"tools": tools, "scenario": scenario}
        held = for_evaluation(overrides, has_examples=examples is not None)
        config = build_config(agent, parts, held, settings, enabled=False)
        request = _request(version, repeat, greedy)
    config = _with_trackers(config, report)
    with new_run(config, name, request) as run, _progress_display(progress) as display:
        await evaluate_in(config, run, request, progress=display)
    return Run(run.path)


@_check_arguments
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
    """Resume a stopped run, without repeating any finished work.

    If the run was given Python objects that its config cannot name, give the same ones again: `agent`,
    `reward`, `examples`, `validation`, `tools`. `report` may differ. `retry` repeats failed work if the agent
    did not cause the failure. Settings may change how the run continues: `epochs=20` trains a finished run
    for longer. Raises RequestError for settings that would make it a different run. `run` may also be the
    address of a backup (`s3://bucket/etude/RUN`), which is restored into `output_dir`.
    """
    changes: list[str | Override] = [*overrides]
    if isinstance(run, str) and "://" in run:
        restored, changes = await asyncio.to_thread(restore, run, Path(output_dir), changes)
        run = restored.run
        with _progress_display(progress) as display:
            display.message(str(restored))
    path = run.folder if isinstance(run, Run) else find_run(str(run), Path(output_dir))
    objects = {"agent": agent, "reward": reward, "examples": examples, "validation": validation}
    with RunFolder.open(path) as folder:  # This verifies the journal, from which the config is read.
        if (request := read_request(folder.journal)) is not None:
            refuse_training(settings)
        changes += settings_as_overrides(settings, lambda: config_to_resume(path, changes).finetuning.trainer)
        config = with_python_objects(config_to_resume(path, changes), **objects, tools=tools)
        require_objects(config, folder.path)
        config = _with_trackers(config, report)
        await note_changes(folder, config)
        if retry:
            await retry_failed(folder)
        if request is None:
            return await train_in(config, folder, progress=progress)
        with _progress_display(progress) as display:
            await evaluate_in(config, folder, request, progress=display)
    return Run(path)


def load_run(run: str | Path, *, output_dir: str | Path = "runs") -> Run:
    """Open a run by its folder, or its name in `output_dir`. Raises RequestError if there is none."""
    return Run(find_run(str(run), Path(output_dir)))


@contextmanager
def new_run(
    config: Config, name: str | None = None, request: EvaluationRequest | None = None
) -> Iterator[RunFolder]:
    """Yield an open run folder in the config's output folder. With `request`, it is an evaluation's.

    If the block raises RequestError and nothing was journalled, the folder is deleted, so that its name is
    free again. Raises RequestError when the run exists, StoreError when its folder cannot be made.
    """
    root = config.finetuning.output_dir.absolute()
    if name is None and request is not None:
        name = new_run_name(root, "evaluation-")
    stored = None if request is None else request.model_dump(mode="json")
    text, seed = resolved_yaml(config), config.finetuning.seed
    with RunFolder.create(root, name, config=text, request=stored, seed=seed) as run:
        try:
            yield run
        except RequestError:
            if run.is_blank:
                shutil.rmtree(run.path, ignore_errors=True)
            raise


async def train_in(
    config: Config,
    run: RunFolder,
    *,
    progress: Progress | bool = False,
    report: Report | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> Run:
    """Train as the config says, continuing from the finished work in the open run folder.

    `report` writes the run's files; the default writes all of them. `engines` replace entries of `llms`.
    """
    if not config.finetuning.enabled:
        raise RequestError("finetuning is not enabled in this config; set 'finetuning.enabled: true'")
    with rare_garbage_collection(), _progress_display(progress) as display:
        write = report or functools.partial(write_metrics, tell=display.message)
        reporting = Reporting(Builder(config, run), run, display)

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
    for status in statuses:  # A custom trainer may return failures instead of raising them.
        if status.status is not TrainingStatusEnum.COMPLETED:
            message = f": {status.message}" if status.message else ""
            raise TrainingError(f"job {status.run_id} ({status.backend}) ended as '{status.status}'{message}")
    return Run(run.path)


async def evaluate_in(
    config: Config, run: RunFolder, request: EvaluationRequest, *, progress: Progress
) -> EvaluationScores:
    """Evaluate as the config says, continuing from the finished work in the open run folder."""
    with rare_garbage_collection():
        async with Reporting(Builder(config, run), run, progress):
            return await run_evaluation(config, run, request, progress=progress)


def request_for(
    source: Any,
    overrides: Iterable[str | Override],
    model: Any = None,
    root: Path | None = None,
    *,
    repeat: int = 1,
    greedy: bool = False,
) -> tuple[Config, EvaluationRequest, RunVersion | None]:
    """Load a config, with `model` instead of its own. Return it, the request and the model's version.

    Runs are looked for and stored in `root`, by default the config's folder for them.
    """
    changes = for_evaluation(overrides)
    if root is not None:
        changes.append(Override(("finetuning", "output_dir"), root, "output_dir"))
    config = load(source, changes)
    version = _trained_version(model, root or config.finetuning.output_dir)
    if model is not None:
        config = load(source, [*changes, *model_overrides(config, str(model), version)])
    return config, _request(version, repeat, greedy), version


class EvaluationRunConfig(DataModel, arbitrary_types_allowed=True):
    """The config to evaluate, and the examples."""

    config_file: Path | dict[str, Any] | Config
    """A config: its file, or its content."""
    dataset: Path | str | None = None
    """A file of examples that replaces the config's examples."""
    override: tuple[tuple[str, str], ...] = ()
    """Keys of the config with new values, as for `-o` on the command line."""
    reps: int = Field(default=1, ge=1)
    """Episodes for each example."""


@dataclass
class EvaluationRun:
    """One evaluation, in a new run folder, under the NeMo Agent Toolkit's names."""

    config: EvaluationRunConfig

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Run the episodes and score them. Raises as `etude.evaluate` does."""
        config, request, _ = request_for(self.config.config_file, self._changes(), repeat=self.config.reps)
        with new_run(config, None, request) as run:
            return (await evaluate_in(config, run, request, progress=Progress())).output

    def _changes(self) -> list[str | Override]:
        given, changes = self.config, list[str | Override]()
        changes += (f"{key}={value}" for key, value in given.override)
        if given.dataset is not None:
            # The current folder comes first, as for all files that a program names.
            path = Path(given.dataset).absolute()
            source = str(path if path.exists() else given.dataset)
            changes.append(Override(OTHER_DATASETS[0], source, "dataset"))
        return changes


def _request(version: RunVersion | None, repeat: int, greedy: bool) -> EvaluationRequest:
    if not 1 <= repeat <= 10_000:
        raise RequestError(f"repeat must be 1 to 10,000, found {repeat!r}")
    which: dict[str, Any] = {}
    if version is not None:
        which = {"run": str(version.run), "version": version.number, "target": version.target}
    return EvaluationRequest(repeat=repeat, greedy=greedy, **which)


def _trained_version(model: Any, root: Path) -> RunVersion | None:
    if isinstance(model, Run):
        model = model.model
    if isinstance(model, TrainedModel):
        return model.chosen
    return run_version(model, root) if isinstance(model, str) else None


def _progress_display(progress: Progress | bool) -> AbstractContextManager[Progress]:
    if isinstance(progress, bool):
        return progress_for() if progress else Progress()
    return nullcontext(progress)


train = blocking(train_async)
evaluate = blocking(evaluate_async)
resume = blocking(resume_async)


def _with_trackers(config: Config, report: Any) -> Config:
    """Return the config with the trackers that a program gives now. Raises ConfigError."""
    if report is None:
        return config
    given = report if isinstance(report, list | tuple) else [report]
    sources: dict[tuple[str | int, ...], Any] = {}
    for index, each in enumerate(given):
        if not isinstance(each, str | dict | TrackerConfig):
            as_tracker(each)  # Raises RequestError if it is none.
            name = getattr(each, "__name__", type(each).__name__)
            each = LiveTrackerConfig(name=name, value=each)
        sources["report", index] = each
    trackers = parse_components("trackers", sources, config)
    there = {(each.type_name, each.destination()) for each in trackers}
    kept = [
        each
        for each in config.report
        if not isinstance(each, LiveTrackerConfig) and (each.type_name, each.destination()) not in there
    ]
    return config.model_copy(update={"report": [*kept, *trackers]})
