"""The agents of a group, and the settings that they must agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from etude.backends.capabilities import JobHyperparameters
from etude.core.errors import RequestError
from etude.protocols.protocol import Protocol

_LEAST = {"min_rows": 1, "num_epochs": 1, "lora_rank": 0}
_MOST = {"num_epochs": 10_000_000, "lora_rank": 100_000, "rl_learning_rate": 10, "lora_alpha_scale": 10_000}
"""Bounds of backends, and of what any model is as wide as: their errors have other names for these."""
_MOST_ALPHA = 1_000_000
_POSITIVE = ("rl_learning_rate", "dpo_beta", "lora_alpha_scale")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Everything that a shared model depends on."""

    model_name: str
    """The base model, as its backend or `llms` names it."""
    freeze_agent: bool = False
    """Never train it."""
    fine_tune_from_scratch: bool = False
    """Start each job from the base model."""
    dry_run: bool = False
    """Make data sets, and submit nothing."""
    min_rows: int = 1
    """Fewer rows are too little to train on."""
    num_epochs: int | None = None
    """Times that a job goes over its data. None leaves it to the adapter's config."""
    rl_learning_rate: float | None = None
    """Learning rate of `dpo` and `grpo`. None leaves it to the adapter's config."""
    dpo_beta: float | None = None
    """How hard preferences pull away from the reference. None leaves it to the adapter's config."""
    lora_rank: int | None = None
    """Rank of the LoRA weights; 0 trains all weights. None leaves it to the adapter's config."""
    lora_alpha_scale: float = 1.0
    """LoRA's alpha as a multiple of `lora_rank`."""

    def __post_init__(self) -> None:
        """Raise RequestError for a value that no job can have."""
        for name in (*_LEAST, *_POSITIVE):
            value, is_whole = getattr(self, name), name in _LEAST
            if value is None:
                continue
            kind = int if is_whole else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
                raise RequestError(f"{name} is a {'whole ' * is_whole}number, and not {value!r}")
            if is_whole and value < _LEAST[name]:
                raise RequestError(f"{name} is at least {_LEAST[name]}, and not {value}")
            if not is_whole and value <= 0:
                raise RequestError(f"{name} is greater than 0, and not {value}")
            if value > _MOST.get(name, math.inf):
                raise RequestError(f"{name} is at most {_MOST[name]}, and not {value}")
        if self.lora_alpha_scale != 1.0 and not self.lora_rank:
            raise RequestError("lora_alpha_scale is a multiple of lora_rank: set that too")
        if self.lora_alpha is not None and not 0 < self.lora_alpha <= _MOST_ALPHA:
            product = f"lora_rank {self.lora_rank} times lora_alpha_scale {self.lora_alpha_scale:g}"
            raise RequestError(
                f"{product} is LoRA's alpha: it is greater than 0 and at most {_MOST_ALPHA}, and not "
                f"{self.lora_alpha:g}"
            )

    @property
    def lora_alpha(self) -> float | None:
        """LoRA's alpha; None where all weights are trained, or the adapter's config says how."""
        return round(self.lora_rank * self.lora_alpha_scale, 6) if self.lora_rank else None

    @property
    def hyperparameters(self) -> JobHyperparameters:
        """Those of these settings that travel with a job."""
        return JobHyperparameters(
            self.num_epochs, self.rl_learning_rate, self.dpo_beta, self.lora_rank, self.lora_alpha
        )


@dataclass(frozen=True, slots=True)
class GroupAgent:
    """An agent with a model that it may share with others."""

    agent_name: str
    settings: ModelSettings
    shared_model_group: str | None = None
    """The group that it belongs to; None for a group of its own, with its name."""
    may_decide: bool = False
    """Whether it is a verifier, whose guesses can be replaced by the truth."""


def agents_of_model(
    protocol: Protocol, policies: Mapping[str, str], model: str, group: str, settings: ModelSettings
) -> list[GroupAgent]:
    """The agents of a protocol whose policy is `model`, as the agents of a group."""
    return [
        GroupAgent(agent, settings, group, role.may_decide)
        for agent, role in protocol.agents.items()
        if policies.get(agent) == model
    ]


def by_name(group: str, agents: Iterable[GroupAgent]) -> dict[str, GroupAgent]:
    """The agents of a group by name.

    Raises RequestError for no agents, two with one name, or one of another group.
    """
    named: dict[str, GroupAgent] = {}
    for agent in agents:
        belongs_to = agent.shared_model_group or agent.agent_name
        if belongs_to != group:
            raise RequestError(
                f"agent '{agent.agent_name}' belongs to the group '{belongs_to}', not to '{group}'"
            )
        if agent.agent_name in named:
            raise RequestError(f"group '{group}' has two agents called '{agent.agent_name}'")
        named[agent.agent_name] = agent
    if not named:
        raise RequestError(f"group '{group}' has no agents")
    return named


def agreed(group: str, agents: Mapping[str, GroupAgent]) -> ModelSettings:
    """The settings that all agents have. Raises RequestError naming the first that they differ in."""
    first, *others = agents.values()
    settings = asdict(first.settings)
    for other in others:
        for name, value in asdict(other.settings).items():
            if value != settings[name]:
                raise RequestError(
                    f"group '{group}': agents that share a model must agree on {name}, and it is "
                    f"{settings[name]!r} for '{first.agent_name}' and {value!r} for '{other.agent_name}'"
                )
    return first.settings
