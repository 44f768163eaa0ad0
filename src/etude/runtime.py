"""The runtime: the parts of one run, assembled from its config."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from etude.backup.attach import backed_up
from etude.backup.replicator import Replicator
from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.finetuning import TargetConfig
from etude.config.schema import Config
from etude.core.call import Sampling
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.history import History
from etude.core.interfaces import Engine, Progress
from etude.inference.opponents_config import OpponentsConfig
from etude.rewards.evaluation import Evaluation
from etude.rewards.evaluation_run import EvaluationRun
from etude.rollout.collector import Collector, Limits
from etude.rollout.workflow import Workflow
from etude.store.run_folder import RunFolder

Report = Callable[[History, Path, bool], None]
"""Writes the metrics files of a history into a folder; True when the run is over."""


@dataclass(frozen=True)
class Runtime:
    """Everything that builders and trainers work with."""

    config: Config
    run: RunFolder
    builder: Builder
    evaluation: Evaluation
    """Runs and scores episodes; where a trainer is at work, each call is a collection of its own."""
    examples: Sequence[Example]
    engines: Mapping[str, Engine]
    """By their names in `llms`."""
    target_model: str
    """The entry of `llms` that is trained; of several, the first."""
    target: str | None = None
    """The name of the target that this is the runtime of, where several models are trained in one run."""
    target_config: TargetConfig = field(default_factory=TargetConfig)
    """When that target is trained."""
    validation_examples: Sequence[Example] = ()
    """Held-out examples; empty when there is no validation."""
    progress: Progress = field(default_factory=Progress)
    report: Report | None = None
    """Called after every epoch and validation, once it is journalled."""
    backup: Replicator | None = None
    """Backs the run up while it goes on, where the config has a storage."""


@asynccontextmanager
async def open_runtime(
    config: Config,
    run: RunFolder,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> AsyncIterator[Runtime]:
    """Build the agent, its models, evaluators and examples; all are closed again at the end.

    `engines` take the place of entries of `llms` by the same name; they are not closed. The run is backed up
    meanwhile, and once more at the end. Raises RequestError or DatasetError for what cannot be built.
    """
    progress = progress or Progress()
    async with backed_up(config.storage, run, progress) as backup, Builder(config, run) as builder:
        workflow: Workflow = await builder.get_workflow()
        given = dict(engines or {})
        models = {name: given.get(name) or await builder.get_llm(name) for name in config.llms} | given
        evaluators = {name: await builder.get_evaluator(name) for name in config.eval.evaluators}
        settings = config.finetuning.run_configuration
        target = _target_model(config, models)
        general = config.eval.general
        collector = Collector(
            workflow,
            models,
            run.journal,
            seed=config.finetuning.seed,
            limits=Limits(general.max_concurrency, general.timeout, general.max_calls),
            sampling=_sampling(config),
            template_options={
                name: getattr(llm, "chat_template_kwargs", {}) for name, llm in _played(config).items()
            },
            # Where several are trained there is none that is meant before the others.
            default_model=None if config.finetuning.targets else target,
            tools={name: await builder.get_tools(name) for name in config.tools},
        )
        evaluation = EvaluationRun(
            collector,
            evaluators,
            run.journal,
            error_budget=config.finetuning.error_budget,
            timeout=general.timeout,
            max_concurrency=general.max_concurrency,
        )
        examples = (await builder.get_dataset(settings.dataset)).examples()
        held_out = settings.validation_dataset
        validation = (await builder.get_dataset(held_out)).examples() if held_out is not None else []
        yield Runtime(
            config=config,
            run=run,
            builder=builder,
            evaluation=evaluation,
            examples=examples,
            engines=models,
            target_model=target,
            validation_examples=validation,
            progress=progress,
            report=report,
            backup=backup,
        )


def _target_model(config: Config, models: Mapping[str, Engine]) -> str:
    """The model that is trained, and meant where an agent names none."""
    targets = config.finetuning.targets.values()
    for name in (config.finetuning.target_model, *(target.model for target in targets), *models):
        if name is not None:
            return name
    raise RequestError("the config has no models; add one: `llms: {policy: {_type: local, …}}`")


def _played(config: Config) -> dict[str, LlmConfig]:
    """The entry that says how each model samples: of opponents, that of the model that they play."""
    return {
        name: config.llms[llm.of] if isinstance(llm, OpponentsConfig) else llm
        for name, llm in config.llms.items()
    }


def _sampling(config: Config) -> dict[str, Sampling]:
    """How each model samples where a call does not say, as its config has it."""
    sampling = {name: getattr(llm, "sampling", None) for name, llm in _played(config).items()}
    return {name: each for name, each in sampling.items() if isinstance(each, Sampling)}
