"""The workflow, dataset and evaluators for environments of the verifiers library: `_type: verifiers`.

Importing this module registers them. It does not load verifiers.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import DatasetConfig, Entries, LlmRef, ReferenceTo, Supplies, WorkflowConfig
from etude.config.registry import register_dataset, register_workflow
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.integrations.verifiers.environment import (
    REWARD,
    Tasks,
    open_environment,
    read_block,
    require_verifiers,
    role_configs,
)
from etude.rollout.workflow import Workflow


class VerifiersWorkflowConfig(WorkflowConfig, name="verifiers"):
    """An environment of the verifiers library, whose agents sample from entries of `llms`."""

    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    environment: str | dict[str, Any]
    """The package of the tasks, such as `gsm8k_v1`, or a module in the config's folder. Or the whole block
    `[env]` of a verifiers config: `{taskset: {id: …}, solver: {max_turns: 4}}`."""
    models: Annotated[dict[str, LlmRef], ReferenceTo("agents")] = Field(default_factory=dict)
    """The model of each role, by the role's name in the environment. Default: the trained model."""
    own_rewards: bool = False
    """Set this to train each model on the reward of its own role in `models`. Otherwise, and for a model with
    several roles, the reward is the mean of all runs."""
    scores: list[str] = Field(default_factory=list)
    """Names of rewards and metrics of the environment to use as evaluators, beside the whole `reward`."""
    size: int | None = Field(default=None, ge=1)
    """The maximum number of training tasks. Default: all tasks, or 256 of an endless taskset."""
    held_out: int | None = Field(default=None, ge=0)
    """The number of validation tasks. Default: a quarter of the tasks, at most 64."""

    def agents(self) -> Mapping[str, str | None] | None:
        """Return the roles without a separate endpoint. Raises RequestError for an invalid block."""
        if find_spec("verifiers") is None:
            return None
        roles = role_configs(read_block(self.environment))
        return {
            name: self.models.get(name, spec.model) for name, spec in roles.items() if spec.client is None
        }

    def supplies(self) -> Supplies:
        """Return the tasks, and evaluators for the rewards and metrics that every episode has."""
        chosen = {"size": self.size, "held_out": self.held_out}
        shared: Entries = {"_type": "verifiers", **{k: v for k, v in chosen.items() if v is not None}}
        names = [REWARD, *self.scores]
        evaluators: dict[str, Entries] = {name: {"_type": "measured", "name": name} for name in names}
        players = Counter(self.models.values())
        own = {role: model for role, model in self.models.items() if players[model] == 1}
        if self.own_rewards:
            evaluators |= {
                f"{role}_reward": {"_type": "measured", "name": REWARD, "agent": role} for role in own
            }
        return Supplies(
            dataset={**shared, "split": "train"},
            validation=None if self.held_out == 0 else {**shared, "split": "validation"},
            evaluators=evaluators,
            reward=REWARD,
            reward_of_model={model: f"{role}_reward" for role, model in own.items() if self.own_rewards},
        )


@register_workflow(config_type=VerifiersWorkflowConfig)
async def verifiers_workflow(config: VerifiersWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises MissingExtraError without verifiers, RequestError if building fails."""
    require_verifiers()
    from etude.integrations.verifiers.play import VerifiersWorkflow

    env = open_environment(config.environment, config.models)
    for name, spec in role_configs(env.config).items():
        if spec.client is None and spec.model is not None and spec.model not in builder.config.llms:
            known = ", ".join(builder.config.llms)
            raise RequestError(f"the role '{name}' has the model '{spec.model}', and `llms` has {known}")
    player = VerifiersWorkflow(env, Tasks(env.taskset))
    try:
        yield Workflow(player.name, player)
    finally:
        await player.close()


class VerifiersDatasetConfig(DatasetConfig, name="verifiers"):
    """The tasks of the workflow's environment. An example's id is the key of its task."""

    split: Literal["train", "validation", "all"] = "train"
    """`train` and `validation` share no task. `all` has every task, in its original order."""
    size: int | None = Field(default=None, ge=1)
    """The maximum number of training tasks, or of tasks in `all`. Default: all, or 256 if endless."""
    held_out: int | None = Field(default=None, ge=0)
    """The number of validation tasks, the same for both splits. Default: a quarter, at most 64."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Other taskset options for these tasks, such as `{split: test}`."""


@dataclass(frozen=True)
class VerifiersDataset:
    """The examples of a split."""

    tasks: Tasks
    config: VerifiersDatasetConfig

    def examples(self) -> list[Example]:
        """Return the examples of the split. Raises DatasetError as `Tasks.examples` does."""
        config = self.config
        return self.tasks.examples(config.split, config.size, config.held_out)


@register_dataset(config_type=VerifiersDatasetConfig)
async def verifiers_dataset(
    config: VerifiersDatasetConfig, builder: Builder
) -> AsyncIterator[VerifiersDataset]:
    """Build the dataset. Raises RequestError for a workflow of another type, or an invalid option."""
    require_verifiers()
    from etude.integrations.verifiers.play import VerifiersWorkflow

    player = (await builder.get_workflow()).fn
    if not isinstance(player, VerifiersWorkflow):
        raise RequestError("a dataset of `_type: verifiers` needs the workflow `_type: verifiers`")
    tasks = player.tasks
    yield VerifiersDataset(tasks.with_options(config.taskset) if config.taskset else tasks, config)
