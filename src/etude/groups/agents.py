"""The agents of a group, and what they must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from etude.adapters.lm_server_config import LmServerAdapterConfig
from etude.adapters.local_config import LocalAdapterConfig
from etude.adapters.openai_config import JobsConfig
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.errors import RequestError
from etude.protocols.protocol import Protocol


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
    num_epochs: int = 1
    """Times that a job goes over its data."""
    rl_learning_rate: float | None = None
    """None leaves it to the backend."""
    dpo_beta: float | None = None
    """None leaves it to the backend."""
    lora_rank: int | None = None
    """None trains all weights."""
    lora_alpha_scale: float = 1.0
    """LoRA's alpha as a multiple of the rank."""

    @classmethod
    def of_adapter(cls, model_name: str, config: TrainerAdapterConfig, **settings: bool) -> ModelSettings:
        """The settings that a config has for its adapter; those of the shipped adapters are known here."""
        if isinstance(config, JobsConfig):
            return cls(model_name, **_of_jobs(config), **settings)
        if not isinstance(config, LocalAdapterConfig):
            return cls(model_name, **settings)
        lora = config.lora
        return cls(
            model_name,
            num_epochs=config.passes,
            rl_learning_rate=config.learning_rate,
            dpo_beta=config.dpo.beta,
            lora_rank=None if lora is None else lora.r,
            lora_alpha_scale=1.0 if lora is None else lora.alpha / lora.r,
            **settings,
        )


def _of_jobs(config: JobsConfig) -> dict[str, Any]:
    """Where the config leaves something to the API, so do the settings."""
    more: Mapping[str, Any] = config.hyperparameters if isinstance(config, LmServerAdapterConfig) else {}
    rank = more.get("lora_rank") or None
    found = {
        "min_rows": config.min_rows,
        "num_epochs": 1 if config.n_epochs == "auto" else config.n_epochs,
        "rl_learning_rate": more.get("learning_rate"),
        "dpo_beta": None if config.beta == "auto" else config.beta,
        "lora_rank": rank,
        "lora_alpha_scale": None if rank is None or "lora_alpha" not in more else more["lora_alpha"] / rank,
    }
    return {name: value for name, value in found.items() if value is not None}


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

    Raises RequestError for no agents, one that is there twice, or one of another group.
    """
    found: dict[str, GroupAgent] = {}
    for agent in agents:
        belongs_to = agent.shared_model_group or agent.agent_name
        if belongs_to != group:
            raise RequestError(
                f"agent '{agent.agent_name}' belongs to the group '{belongs_to}', not to '{group}'"
            )
        if agent.agent_name in found:
            raise RequestError(f"group '{group}' has two agents called '{agent.agent_name}'")
        found[agent.agent_name] = agent
    if not found:
        raise RequestError(f"group '{group}' has no agents")
    return found


def agreed(group: str, agents: Mapping[str, GroupAgent]) -> ModelSettings:
    """The settings that all agents have. Raises RequestError naming the first that they differ in."""
    first, *others = agents.values()
    mine = asdict(first.settings)
    for other in others:
        for name, value in asdict(other.settings).items():
            if value != mine[name]:
                raise RequestError(
                    f"group '{group}': agents that share a model must agree on {name}, and it is "
                    f"{mine[name]!r} for '{first.agent_name}' and {value!r} for '{other.agent_name}'"
                )
    return first.settings
