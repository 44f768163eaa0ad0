"""The agent of a config, put together by the same code in the run's process and in its runners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.schema import Config
from etude.core.call import Sampling
from etude.core.errors import RequestError
from etude.core.interfaces import Engine, Evaluator
from etude.inference.local import OpponentsConfig
from etude.rollout.collector import Collector, Limits, Runner
from etude.rollout.workflow import Workflow
from etude.store.journal import Steps


async def build_collector(
    builder: Builder,
    models: Mapping[str, Engine],
    journal: Steps,
    runner: Runner | None = None,
) -> Collector:
    """The collector of the config's workflow, which plays episodes in `runner` or else in this process.

    Raises RequestError for what cannot be built; nothing is sampled.
    """
    config = builder.config
    workflow: Workflow = await builder.get_workflow()
    general = config.eval.general
    return Collector(
        workflow,
        models,
        journal,
        seed=config.finetuning.seed,
        limits=Limits(general.max_concurrency, general.timeout, general.max_calls),
        sampling=_sampling(config),
        template_options={
            name: getattr(llm, "chat_template_kwargs", {}) for name, llm in _played(config).items()
        },
        # Where several are trained there is none that is meant before the others.
        default_model=None if config.finetuning.targets else target_model(config, models),
        tools={name: await builder.get_tools(name) for name in config.tools},
        runner=runner,
    )


async def build_evaluators(builder: Builder) -> dict[str, Evaluator]:
    return {name: await builder.get_evaluator(name) for name in builder.config.eval.evaluators}


def target_model(config: Config, models: Mapping[str, Any]) -> str:
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
