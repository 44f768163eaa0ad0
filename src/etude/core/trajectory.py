"""Trajectories: what a trainer sees of an episode.

Names and meanings follow the finetuning harness of the NeMo Agent Toolkit; what it lacks is added
beside them: token ids, per-token data and tool messages that stay tool messages.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from etude.core.data_model import DataModel, Number
from etude.core.message import OpenAIMessage


class EpisodeItemRole(StrEnum):
    """Who an item of an episode comes from."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(DataModel):
    """One message of an episode. Only assistant items are trained on."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    """Assistant items: one number per sampled token, or a backend's own logprobs object."""
    token_ids: tuple[int, ...] | None = None
    """Assistant items: the sampled token ids, end of turn included."""
    context_ids: tuple[int, ...] | None = None
    """Assistant items: the tokens between the previous assistant item and this one, as the model saw
    them. Concatenating `context_ids` and `token_ids` of all assistant items gives the sequence."""
    metadata: dict[str, Any] | None = None
    """`tool_calls`, `tool_call_id` and `name` of the message, and facts of the call."""

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> EpisodeItem:
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be provided for assistant role.")
        return self


class DPOItem(DataModel):
    """A preference: two responses to one prompt."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str
    prompt_ids: tuple[int, ...] | None = None
    chosen_ids: tuple[int, ...] | None = None
    rejected_ids: tuple[int, ...] | None = None
    """Token ids as they were sampled; where they are None, a backend tokenises the text."""
    chosen_logprobs: tuple[float, ...] | None = None
    rejected_logprobs: tuple[float, ...] | None = None
    """Logprobs under the policy that sampled the responses, which is DPO's reference by default.
    One number per token id; 0.0 where the mask is False."""
    chosen_mask: tuple[bool, ...] | None = None
    rejected_mask: tuple[bool, ...] | None = None
    """Per token id, whether the model sampled it. Observations inside a multi-turn response are False:
    they are context, and count neither in the loss nor in the reference. None: all were sampled."""


class Trajectory(DataModel):
    """What a trainer sees of an episode, for one model."""

    episode: list[EpisodeItem] | list[DPOItem]
    reward: Number
    shaped_rewards: list[Number] | None = None
    """One reward per assistant item, where the agent gave step rewards: the discounted return."""
    metadata: dict[str, Any] | None = None
    """`id` of the example, `generation`, `episode` id, `branch`, and what the builder adds."""

    @field_validator("reward")
    @classmethod
    def _finite(cls, reward: float) -> float:
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number, found {reward}")
        return reward


Method = Literal["grpo", "dpo", "supervised"]


class TrajectoryCollection(DataModel):
    """Trajectories of one epoch, grouped: a group starts from one example (or one turn)."""

    trajectories: list[list[Trajectory]] = Field(default_factory=list)
    run_id: str
    method: Method = "grpo"
    """The training method that the builder made these trajectories for."""

    def __len__(self) -> int:
        """Trajectories in all groups together."""
        return sum(len(group) for group in self.trajectories)
