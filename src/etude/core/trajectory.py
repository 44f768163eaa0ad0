"""Trajectories: what a trainer sees of an episode.

Names and meanings follow the finetuning harness of the NeMo Agent Toolkit; what it lacks is added
beside them: token ids, per-token data and tool messages that stay tool messages.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, FiniteFloat, model_validator

from etude.core.call import Sampling, SamplingField
from etude.core.data_model import DataModel, Number, number
from etude.core.message import Message, OpenAIMessage, Tool


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
    advantages: tuple[float, ...] | None = None
    """Assistant items: one number per sampled token, where whoever made the item has given them."""
    weights: tuple[float, ...] | None = None
    """Assistant items: each sampled token's share in the loss; all have the same where it is None."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Assistant items: of the sampled tokens under a teacher."""
    given: bool = False
    """Assistant items: the agent wrote it into a prompt itself. It is context, and not trained on."""
    replaced: bool = False
    """Assistant items: the text takes the place of what was sampled, and a backend makes its tokens."""
    sampling: SamplingField = Sampling()
    """Assistant items: how it was sampled, as far as the distributions of its tokens depend on it."""
    model_version: int | None = None
    """Assistant items: the version of the weights that sampled it; None where nobody knows."""
    finish_reason: str = "stop"
    """Assistant items: why the model stopped; `length` where it was cut off."""
    metadata: dict[str, Any] | None = None
    """`reasoning_content` (what the model thought before its answer), `tool_calls`, `tool_call_id` and `name`
    of the message, and for people facts of the call."""

    @property
    def is_sampled(self) -> bool:
        """Whether the policy said it: an assistant's message that is not `given`."""
        return self.role is EpisodeItemRole.ASSISTANT and not self.given

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
    """The text of an answer, without its thinking; of several messages a transcript."""
    chosen_message: OpenAIMessage | None = None
    rejected_message: OpenAIMessage | None = None
    """The answers with their thinking and tool calls, for training files; None where one has several
    messages."""
    chosen_messages: list[OpenAIMessage] | None = None
    rejected_messages: list[OpenAIMessage] | None = None
    """The answers with all that came between them, of several messages whose tokens nobody has told."""
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
    sampling: SamplingField = Sampling()
    """How both were sampled, as far as the distributions of their tokens depend on it."""
    turns: int = 1
    """Answers of the model in the chosen response."""
    chosen_episode: str | None = None
    rejected_episode: str | None = None
    """The episodes that they were said in, for people."""

    @property
    def prompt_messages(self) -> list[Message]:
        """The prompt as the chat completions API has it: text is a message of the user's."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [message.to_wire() for message in self.prompt]


class Trajectory(DataModel):
    """An episode as a trainer sees it, for one model."""

    episode: list[EpisodeItem] | list[DPOItem]
    reward: Annotated[FiniteFloat, BeforeValidator(number)]
    shaped_rewards: list[Number] | None = None
    """One reward per assistant item, where the agent gave step rewards: the discounted return."""
    example_id: str | None = None
    episode_id: str | None = None
    """Trajectories of one episode have the same, and count as one in their group's statistics."""
    agent: str | None = None
    """Whose answers these are, where the agents of an episode are told apart."""
    tools: list[Tool] | None = None
    """The tools that the model could call."""
    group_rewards: list[Number] | None = None
    """Rewards of all episodes of the group, also of those that are not trained on: the curriculum judges
    the group by them."""
    metadata: dict[str, Any] | None = None
    """For people: `generation`, `branch`, the evaluator's reasoning, and what the builder adds."""


Method: TypeAlias = str
"""The name of an algorithm, by the loss that learns from its data: its `_type`, such as `grpo`, `dpo` or
`supervised`, or `module:Name` of a user's own."""
