"""The lines of training files: one model for each method of training.

`supervised` and `dpo` are OpenAI's own formats. `grpo` is ours. Its line is a group of samples from one
example, with token ids and logprobs as sampled, for any algorithm that learns from these.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, model_validator

from etude.core.call import Sampling, SamplingField
from etude.core.errors import RequestError
from etude.core.message import Message, Tool, message_text, tool_arguments
from etude.core.sample import PER_TOKEN, Kind, Sample, Turn
from etude.core.trajectory import Method

TokenId: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
Logprob: TypeAlias = Annotated[float, Field(ge=-1e5, le=1e-4, allow_inf_nan=False)]
"""A logprob. Rounding may lift it slightly above 0; some servers write -9999 for probability 0."""
Finite: TypeAlias = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
"""A number whose sums and squares are finite too."""


class _Row(BaseModel, frozen=True, extra="forbid"):
    """A part of a line."""


class RowFunction(_Row):
    """The function of a tool call."""

    name: str
    arguments: str
    """JSON text of an object."""

    @model_validator(mode="after")
    def _has_arguments(self) -> Self:
        try:
            tool_arguments({"name": self.name, "arguments": self.arguments}, unique_keys=True)
        except RequestError as error:
            raise ValueError(f"{error}; write an object, such as {{}} where there are none") from error
        return self


class RowToolCall(_Row):
    """A call of a tool by the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: RowFunction


class RowText(_Row):
    """A text part of a message's content. Models here accept no other parts."""

    type: Literal["text"]
    text: str


class RowMessage(_Row):
    """A chat message in a training file."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[RowText] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Assistant messages: the thinking before the answer."""
    tool_calls: list[RowToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    weight: Literal[0, 1] | None = None
    """Assistant messages: 0 if the message is context and not learned."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        texts = (self.content, self.refusal, self.reasoning_content)
        if all(text is None for text in texts) and not self.tool_calls:
            raise ValueError("a message needs content or tool_calls")
        own = (self.tool_calls or None, self.weight, self.reasoning_content)
        if self.refusal and message_text(self.to_wire()) != self.refusal:
            raise ValueError("a message has either content or a refusal, not both")
        if self.role != "assistant" and any(value is not None for value in own):
            raise ValueError("only assistant messages have tool_calls, reasoning_content and a weight")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool message needs its tool_call_id")
        return self

    def to_wire(self) -> Message:
        """Return the message as the chat completions API takes it."""
        wire = self.model_dump(exclude_none=True, exclude={"refusal"})
        return {**wire, "content": wire.get("content", self.refusal)}


class DpoInput(_Row):
    """The prompt of a preference."""

    messages: list[RowMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    parallel_tool_calls: bool | None = None


class SupervisedRow(DpoInput):
    """A conversation to imitate. The assistant's messages are learned, except those with weight 0."""

    @model_validator(mode="after")
    def _teaches_something(self) -> Self:
        if not any(message.role == "assistant" and message.weight != 0 for message in self.messages):
            raise ValueError("there is no assistant message to learn")
        return self


class DpoRow(_Row):
    """A preference between two answers to one prompt."""

    input: DpoInput
    preferred_output: list[RowMessage] = Field(min_length=1, max_length=1)
    non_preferred_output: list[RowMessage] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _answers(self) -> Self:
        if any(
            message.role != "assistant" for message in (*self.preferred_output, *self.non_preferred_output)
        ):
            raise ValueError("both outputs must be assistant messages")
        return self


class GrpoTurn(_Row):
    """One sampled message of a sample."""

    context_ids: tuple[TokenId, ...] = ()
    """The tokens between the previous sampled message and this one, as the model saw them."""
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    """The sampled tokens, including the end of turn."""
    logprobs: tuple[Logprob, ...]
    """Logprobs of the sampled tokens under the distribution that they were sampled from."""
    advantages: tuple[Finite, ...] | None = None
    """Advantages of the sampled tokens. If left out, they are computed from the group's rewards."""
    weights: tuple[Annotated[Finite, Field(ge=0)], ...] | None = None
    """Loss weights of the sampled tokens. If left out, all weigh the same."""
    teacher_logprobs: tuple[Logprob, ...] | None = None
    """Logprobs of the sampled tokens under a teacher."""
    sampling: SamplingField = Sampling()
    """The sampling parameters that change the distributions of the tokens."""
    finish_reason: str | None = None
    """`length` for an answer that was cut off."""

    @model_validator(mode="after")
    def _one_number_a_token(self) -> Self:
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{len(values)} {name} for {len(self.token_ids)} token_ids")
        return self


class GrpoTrajectory(_Row):
    """A sample: the conversation of one episode, or of one branch of it, and its reward."""

    turns: tuple[GrpoTurn, ...] = Field(min_length=1)
    reward: Finite
    shaped_rewards: tuple[Finite, ...] | None = None
    """One reward for each turn. If left out, `reward` applies to all turns."""
    episode: str | None = None
    """The id that all branches of one episode share. They count once in the group's mean."""

    @model_validator(mode="after")
    def _one_reward_a_turn(self) -> Self:
        if self.shaped_rewards is not None and len(self.shaped_rewards) != len(self.turns):
            raise ValueError(f"{len(self.shaped_rewards)} shaped_rewards for {len(self.turns)} turns")
        return self

    @classmethod
    def from_sample(cls, sample: Sample) -> Self:
        """Return the entry of a sample that has token ids and logprobs."""
        turns = [
            GrpoTurn(
                sampling=turn.sampling,
                finish_reason="length" if turn.finish_reason == "length" else None,
                **tokens,
            )
            for turn, tokens in sample.answers
        ]
        returns = None if sample.returns is None else tuple(sample.returns)
        return cls(turns=tuple(turns), reward=sample.reward, shaped_rewards=returns, episode=sample.episode)

    def sample(self, index: int) -> Sample:
        """Return the sample for learners. Without an `episode`, its index names one of its own."""
        returns = self.shaped_rewards or [None] * len(self.turns)
        turns = [
            (Turn(sampling=own.sampling, finish_reason=own.finish_reason or "stop", value=value), own)
            for own, value in zip(self.turns, returns, strict=True)
        ]
        episode = f"#{index}" if self.episode is None else self.episode
        return Sample.from_turns(turns, reward=self.reward, episode=episode)


class GrpoRow(_Row):
    """A group of samples from the same example, whose rewards are compared."""

    trajectories: tuple[GrpoTrajectory, ...] = Field(min_length=1)

    @classmethod
    def from_group(cls, group: Sequence[Sample]) -> Self:
        """Return the row of a group of samples that have token ids and logprobs."""
        return cls(trajectories=tuple(map(GrpoTrajectory.from_sample, group)))

    def group(self) -> list[Sample]:
        """Return the group for learners. The samples have no texts, since the row has none."""
        return [trajectory.sample(index) for index, trajectory in enumerate(self.trajectories)]


TrainingRow: TypeAlias = SupervisedRow | DpoRow | GrpoRow
"""Any line of a training file."""

ROW_OF: dict[Kind, Method] = {"samples": "grpo", "pairs": "dpo", "imitation": "supervised"}
"""The kind of line that each kind of data is written as."""

ROWS: dict[Method, type[TrainingRow]] = {"supervised": SupervisedRow, "dpo": DpoRow, "grpo": GrpoRow}
"""The model of a line, by method."""


_METHOD_OF_FIELD: dict[str, Method] = {
    "messages": "supervised",
    "trajectories": "grpo",
    **dict.fromkeys(DpoRow.model_fields, "dpo"),
}


def guess_method(row: Any) -> Method | None:
    """Return the method that a line is for, judged by its fields; None if no method has them."""
    fields = row if isinstance(row, dict) else {}
    return next((method for field, method in _METHOD_OF_FIELD.items() if field in fields), None)
