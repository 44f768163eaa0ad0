"""`_type: verifiers`: an environment of the verifiers library as workflow, dataset and evaluators.

Importing this registers them, and loads no verifiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from etude.config.component import CHANGEABLE, DatasetConfig, Supplies, WorkflowConfig, Written
from etude.config.references import LlmRef, Refers
from etude.config.registry import register_dataset, register_workflow
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.integrations.verifiers.environment import (
    agents_of,
    missing_parts,
    open_environment,
    read_block,
    require_verifiers,
    score_names,
)
from etude.integrations.verifiers.scores import REWARD
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.verifiers.environment import Tasks


class VerifiersWorkflowConfig(WorkflowConfig, name="verifiers"):
    """An environment of the verifiers library, whose agents sample from entries of `llms`."""

    target_functions: ClassVar[tuple[str, ...]] = ("*",)

    environment: str | dict[str, Any]
    """The package of its tasks, such as `gsm8k_v1`, or a module beside the config; or the whole block `[env]`
    of a config of verifiers': `{taskset: {id: …}, solver: {max_turns: 4}}`."""
    models: Annotated[dict[str, LlmRef], Refers("agents")] = Field(default_factory=dict)
    """The model of each role, by its name in the environment; left out: the trained one."""
    own_rewards: bool = False
    """A model's reward is what its own role in `models` was given; otherwise all have the runs' mean."""
    scores: list[str] = Field(default_factory=list)
    """More rewards and metrics of the environment, by name, that are to be evaluators. Where there is one
    agent, those of the tasks are evaluators without being named."""
    size: int | None = Field(default=None, ge=1)
    """Train on at most this many tasks; of tasks without an end on 256."""
    held_out: int | None = Field(default=None, ge=0)
    """Tasks for validation; left out: a quarter, 64 at most."""
    seed: int = Field(default=0, ge=0)
    """Of the shuffling before tasks are held out."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that an episode may take."""

    def agents(self) -> Mapping[str, str | None] | None:
        """Its roles, but those that have an endpoint of their own. Raises RequestError for a wrong block."""
        if find_spec("verifiers") is None:
            return None
        roles = agents_of(read_block(self.environment))
        return {
            name: self.models.get(name, spec.model) for name, spec in roles.items() if spec.client is None
        }

    def supplies(self) -> Supplies:
        """The tasks, and the rewards and metrics that every episode will have."""
        chosen = {"size": self.size, "held_out": self.held_out, "seed": self.seed}
        shared: Written = {"_type": "verifiers", **{k: v for k, v in chosen.items() if v is not None}}
        names = [REWARD, *self.scores]
        if find_spec("verifiers") is not None:
            names += score_names(read_block(self.environment))
        evaluators: dict[str, Written] = {name: {"_type": "measured", "name": name} for name in names}
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

    def missing(self) -> list[str]:
        """Of what its roles and judges run on."""
        return missing_parts(self.environment)


@register_workflow(config_type=VerifiersWorkflowConfig)
async def verifiers_workflow(config: VerifiersWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises MissingExtraError without verifiers, RequestError for an environment that cannot be made."""
    require_verifiers()
    from etude.integrations.verifiers.environment import Tasks
    from etude.integrations.verifiers.play import Player

    env = open_environment(config.environment, config.models)
    for name, spec in agents_of(env.config).items():
        if spec.client is None and spec.model is not None and spec.model not in builder.config.llms:
            known = ", ".join(builder.config.llms)
            raise RequestError(f"the role '{name}' has the model '{spec.model}', and `llms` has {known}")
    player = Player(env, Tasks(env.taskset))
    try:
        yield Workflow(player.name, player, config.timeout)
    finally:
        await player.close()


class VerifiersDatasetConfig(DatasetConfig, name="verifiers"):
    """The tasks of the workflow's environment. An example's id is the key of its task."""

    split: Literal["train", "validation", "all"] = "train"
    """Training and validation share no task; `all` has every one, in its order."""
    size: int | None = Field(default=None, ge=1)
    """At most this many."""
    held_out: int | None = Field(default=None, ge=0)
    """How many of all are for validation: the same number in both."""
    seed: int = Field(default=0, ge=0)
    """Of the shuffling before."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Other options of the taskset for these, such as `{split: test}`."""


@dataclass(frozen=True)
class VerifiersDataset:
    """The examples of a split."""

    tasks: Tasks
    config: VerifiersDatasetConfig

    def examples(self) -> list[Example]:
        """Raises DatasetError as `Tasks.examples` does."""
        config = self.config
        return self.tasks.examples(config.split, config.size, config.held_out, config.seed)


@register_dataset(config_type=VerifiersDatasetConfig)
async def verifiers_dataset(
    config: VerifiersDatasetConfig, builder: Builder
) -> AsyncIterator[VerifiersDataset]:
    """Raises RequestError when the workflow is no environment of verifiers', or an option is wrong."""
    require_verifiers()
    from etude.integrations.verifiers.play import Player

    player = (await builder.get_workflow()).fn
    if not isinstance(player, Player):
        raise RequestError("a dataset of `_type: verifiers` needs the workflow `_type: verifiers`")
    tasks = player.tasks
    yield VerifiersDataset(tasks.with_options(config.taskset) if config.taskset else tasks, config)
