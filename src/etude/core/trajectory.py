"""Trajectories: episodes as a trainer sees them.

Names and meanings follow the finetuning harness of the NeMo Agent Toolkit. Etude adds token ids, per-token
data, and tool messages that stay tool messages.
"""

from enum import StrEnum
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, FiniteFloat, model_validator

from etude.core.call import Sampling, SamplingField
from etude.core.data_model import DataModel, Number, number
from etude.core.message import Message, OpenAIMessage, Tool


class EpisodeItemRole(StrEnum):
    """The origin of an item of an episode."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


MESSAGE_FIELDS = ("reasoning_content", "tool_calls", "tool_call_id", "name", "function_call", "refusal")
"""The fields of a message that an item has in its metadata."""


class EpisodeItem(DataModel):
    """One message of an episode. Only assistant items are trained on."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    """Assistant items: one number per sampled token, or a backend's own logprobs object."""
    token_ids: tuple[int, ...] | None = None
    """Assistant items: the sampled token ids, including the end of turn."""
    context_ids: tuple[int, ...] | None = None
    """Assistant items: the tokens between the previous assistant item and this one, as the model saw them.
    `context_ids` and `token_ids` of all assistant items, concatenated, are the whole sequence."""
    advantages: tuple[float, ...] | None = None
    """Assistant items: one number per sampled token, if they were given."""
    weights: tuple[float, ...] | None = None
    """Assistant items: loss weight of each sampled token; None if all weigh the same."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Assistant items: logprobs of the sampled tokens under a teacher."""
    given: bool = False
    """Assistant items: whether the agent wrote it into a prompt itself. It is context, and not trained on."""
    replaced: bool = False
    """Assistant items: whether the text replaces the sampled one, and a backend tokenises it."""
    sampling: SamplingField = Sampling()
    """Assistant items: the sampling parameters that change the distributions of its tokens."""
    model_version: int | None = None
    """Assistant items: the version of the weights that sampled it; None if unknown."""
    finish_reason: str = "stop"
    """Assistant items: why the model stopped; `length` if it was cut off."""
    call: int | None = None
    """Assistant items: index of the call within the episode."""
    function: str | None = None
    """Assistant items: the agent's function that made the call."""
    metadata: dict[str, Any] | None = None
    """The message's `reasoning_content` (its thinking), `tool_calls`, `tool_call_id` and `name`."""

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled it: an assistant message that is not `given`."""
        return self.role is EpisodeItemRole.ASSISTANT and not self.given

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> Self:
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be provided for assistant role.")
        return self


class DPOItem(DataModel):
    """A preference: two responses to one prompt."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str
    """The texts of the answers, without thinking. An answer of several messages is a transcript."""
    chosen_messages: list[OpenAIMessage] | None = None
    rejected_messages: list[OpenAIMessage] | None = None
    """The messages of the answers, with their thinking and tool calls and everything between them."""
    prompt_ids: tuple[int, ...] | None = None
    chosen_ids: tuple[int, ...] | None = None
    rejected_ids: tuple[int, ...] | None = None
    """Token ids as sampled. If they are None, a backend tokenises the text."""
    chosen_logprobs: tuple[float, ...] | None = None
    rejected_logprobs: tuple[float, ...] | None = None
    """Logprobs under the policy that sampled the responses, which is DPO's default reference. One number per
    token id; 0.0 where the mask is False."""
    chosen_mask: tuple[bool, ...] | None = None
    rejected_mask: tuple[bool, ...] | None = None
    """Per token id, whether the model sampled it; None if it sampled all. Observations inside a multi-turn
    response are False: they are context, and count neither in the loss nor in the reference."""
    sampling: SamplingField = Sampling()
    """The sampling parameters of both that change the distributions of their tokens."""
    turns: int = 1
    """The number of the model's answers in the chosen response."""
    chosen_episode: str | None = None
    rejected_episode: str | None = None
    """The ids of the responses' episodes, for people."""

    @property
    def prompt_messages(self) -> list[Message]:
        """The prompt in the chat completions format. A text becomes a user message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [message.to_wire() for message in self.prompt]


class Trajectory(DataModel):
    """An episode as a trainer sees it, for one model."""

    episode: list[EpisodeItem] | list[DPOItem]
    reward: Annotated[FiniteFloat, BeforeValidator(number)]
    shaped_rewards: list[Number] | None = None
    """One reward per assistant item, if the agent gave step rewards: the discounted return."""
    example_id: str | None = None
    episode_id: str | None = None
    """The id that all trajectories of one episode share. They count as one in their group's statistics."""
    agent: str | None = None
    """The agent that gave these answers, in an episode with named agents."""
    tools: list[Tool] | None = None
    group_rewards: list[Number] | None = None
    """Rewards of all episodes of the group, also of those that are not trained on. The curriculum judges the
    group by them."""
    metadata: dict[str, Any] | None = None
    """Facts for people: `generation`, `branch`, the evaluator's reasoning, and additions of the builder."""


Method: TypeAlias = str
"""The name of an algorithm, by its loss: its `_type`, such as `grpo`, `dpo` or `supervised`, or `module:Name`
of a user's own."""
