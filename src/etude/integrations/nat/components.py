"""Components for the workflow, dataset and evaluators of a toolkit config: `_type: nat`.

Importing this module registers them. It does not load the toolkit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from etude.config.component import DatasetConfig, EvaluatorConfig, WorkflowConfig
from etude.config.registry import register_dataset, register_evaluator, register_workflow
from etude.core.errors import RequestError, require_extra
from etude.core.interfaces import Evaluator
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.nat.agent import NatAgent
    from etude.integrations.nat.evaluation import NatDataset


class NatWorkflowConfig(WorkflowConfig, name="nat"):
    """The workflow of a NeMo Agent Toolkit config, which calls the trained model."""

    config_file: Path | None = None
    """The path of the toolkit's config. `nat finetune` leaves it out, because it has read the config."""
    model: str | None = None
    """The entry of the toolkit's `llms` to train. Default: the only entry."""
    result_json_path: str = "$"
    """The JSON path of the answer in the workflow's output, as in `nat eval`."""
    digest: str | None = None
    """A hash of the toolkit's config, which `nat finetune` sets to distinguish configs."""

    _toolkit_config: Any = PrivateAttr(default=None)

    def toolkit_config(self) -> Any:
        """Return the toolkit's config. Raises RequestError if it is missing or cannot be read."""
        if self._toolkit_config is not None:
            return self._toolkit_config
        if self.config_file is None:
            raise RequestError(
                "this run was started by `nat finetune`; run that command again to resume it. In a config of "
                "Etude, `workflow.config_file` names the toolkit's config"
            )
        from nat.runtime.loader import load_config

        try:
            return load_config(self.config_file)
        except (OSError, ValueError) as error:
            problem = f"{self.config_file} cannot be read as a config of the toolkit: {error}"
            raise RequestError(problem) from error


@dataclass(frozen=True)
class NatWorkflow(Workflow):
    """A workflow with the agent that its evaluators and examples come from."""

    agent: NatAgent | None = None


@register_workflow(config_type=NatWorkflowConfig)
async def nat_workflow(config: NatWorkflowConfig, builder: Builder) -> AsyncIterator[NatWorkflow]:
    """Build the toolkit's workflow. Raises MissingExtraError without the toolkit."""
    require_extra("nat.plugins.eval", "a workflow of the NeMo Agent Toolkit", "nat")
    from etude.integrations.nat.agent import open_agent

    toolkit_config = config.toolkit_config()
    model = config.model or only_model(toolkit_config.llms)
    journal = None if builder.run is None else builder.run.journal
    async with open_agent(toolkit_config, model, config.result_json_path, journal) as agent:
        yield NatWorkflow("nat", agent.run, agent=agent)


def only_model(llms: Mapping[str, Any]) -> str:
    """Return the name of the only entry. Raises RequestError unless there is exactly one."""
    if len(llms) != 1:
        raise RequestError(
            "name the trained entry of `llms` with `finetuning.target_model`; there are: "
            f"{', '.join(llms) or 'none'}"
        )
    return next(iter(llms))


async def find_agent(builder: Builder) -> NatAgent:
    """Return the agent of the config's workflow. Raises RequestError if it is not the toolkit's."""
    workflow = await builder.get_workflow()
    if not isinstance(workflow, NatWorkflow) or workflow.agent is None:
        raise RequestError("the evaluators and datasets of `_type: nat` need the workflow `_type: nat`")
    return workflow.agent


class NatDatasetConfig(DatasetConfig, name="nat"):
    """The examples of `eval.general.dataset` in the workflow's toolkit config."""

    file_path: Path | None = None
    """Another file with the same columns, in the same format."""


@register_dataset(config_type=NatDatasetConfig)
async def nat_dataset(config: NatDatasetConfig, builder: Builder) -> AsyncIterator[NatDataset]:
    """Build the dataset. Raises RequestError if the workflow is not the toolkit's."""
    agent = await find_agent(builder)
    from etude.integrations.nat.evaluation import NatDataset

    yield NatDataset(agent.config.eval.general, config.file_path)


class NatEvaluatorConfig(EvaluatorConfig, name="nat"):
    """An evaluator from `eval.evaluators` in the workflow's toolkit config."""

    evaluator: str
    """The name of the entry in `eval.evaluators`."""


@register_evaluator(config_type=NatEvaluatorConfig)
async def nat_evaluator(config: NatEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """Build the evaluator. Raises RequestError for another workflow, or an unknown evaluator."""
    agent = await find_agent(builder)
    from etude.integrations.nat.evaluation import NatEvaluator

    yield NatEvaluator(agent, config.evaluator)
