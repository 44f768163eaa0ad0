"""The lines of training files: one model for each method of training.

`supervised` and `dpo` are OpenAI's own formats. `grpo` is ours: a line is a group of trajectories from
one example, with the token ids and logprobs as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from etude.core.errors import TrainingError
from etude.core.message import Message, Tool
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Method, Trajectory

TokenId: TypeAlias = Annotated[int, Field(ge=0, strict=True)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowFunction(_Row):
    """What a tool call calls."""

    name: str
    arguments: str
    """JSON text."""


class RowToolCall(_Row):
    """A call of a tool by the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: RowFunction


class RowText(_Row):
    """A part of a message's content. Models here take text only."""

    type: Literal["text"]
    text: str


class RowMessage(_Row):
    """A chat message in a training file."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[RowText] | None = None
    name: str | None = None
    tool_calls: list[RowToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    weight: Literal[0, 1] | None = None
    """Assistant messages: 0 for one that is context and not to be learned."""

    @model_validator(mode="after")
    def _says_something(self) -> RowMessage:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("a message needs a content, or tool_calls")
        if self.role != "assistant" and (self.tool_calls or self.weight is not None):
            raise ValueError("only messages of the role assistant have tool_calls and a weight")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role tool needs its tool_call_id")
        return self

    def to_wire(self) -> Message:
        """The message as the chat completions API has it."""
        wire = self.model_dump(exclude_none=True, exclude={"refusal"})
        return {**wire, "content": wire.get("content", self.refusal)}


class SupervisedRow(_Row):
    """A conversation to imitate: the assistant's messages, but for those of weight 0."""

    messages: list[RowMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _teaches_something(self) -> SupervisedRow:
        if not any(message.role == "assistant" and message.weight != 0 for message in self.messages):
            raise ValueError("there is no message of the role assistant to learn")
        return self


class DpoInput(_Row):
    """The prompt of a preference."""

    messages: list[RowMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    parallel_tool_calls: bool | None = None


class DpoRow(_Row):
    """A preference between two answers to one prompt."""

    input: DpoInput
    preferred_output: list[RowMessage] = Field(min_length=1, max_length=1)
    non_preferred_output: list[RowMessage] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _answers(self) -> DpoRow:
        if any(one.role != "assistant" for one in (*self.preferred_output, *self.non_preferred_output)):
            raise ValueError("both outputs must be messages of the role assistant")
        return self


class GrpoTurn(_Row):
    """One sampled message of a trajectory."""

    context_ids: tuple[TokenId, ...] = ()
    """The tokens between the sampled message before and this one, as the model saw them."""
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    """The sampled tokens, end of turn included."""
    logprobs: tuple[FiniteFloat, ...]
    """Of the sampled tokens, under the distribution that they were sampled from."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_logprob_a_token(self) -> GrpoTurn:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.token_ids)} token_ids")
        return self


class GrpoTrajectory(_Row):
    """What was sampled in one episode, or in one branch of it, and what it was worth."""

    turns: tuple[GrpoTurn, ...] = Field(min_length=1)
    reward: FiniteFloat
    shaped_rewards: tuple[FiniteFloat, ...] | None = None
    """One reward for each turn; left out: `reward` is for all."""
    episode: str | None = None
    """Branches of one episode have the same, and count once in the group's mean."""

    @model_validator(mode="after")
    def _one_reward_a_turn(self) -> GrpoTrajectory:
        if self.shaped_rewards is not None and len(self.shaped_rewards) != len(self.turns):
            raise ValueError(f"{len(self.shaped_rewards)} shaped_rewards for {len(self.turns)} turns")
        return self


class GrpoRow(_Row):
    """A group: trajectories that started from the same example, whose rewards are compared."""

    trajectories: tuple[GrpoTrajectory, ...] = Field(min_length=1)

    @classmethod
    def of_group(cls, group: Sequence[Trajectory]) -> GrpoRow:
        """The row of a group that was sampled with token ids. Raises TrainingError where there are none."""
        return cls(trajectories=tuple(_row_of(trajectory) for trajectory in group))

    def group(self) -> list[Trajectory]:
        """The group as learners take it; the texts are not in the row, and left empty."""
        return [_trajectory_of(one, place) for place, one in enumerate(self.trajectories)]


ROWS: dict[Method, type[SupervisedRow | DpoRow | GrpoRow]] = {
    "supervised": SupervisedRow,
    "dpo": DpoRow,
    "grpo": GrpoRow,
}
"""The model of a line, by method."""


def method_of(row: Any) -> Method | None:
    """The method that a line is for, by its fields; None for a line of no method."""
    fields = row.keys() if isinstance(row, dict) else ()
    if "messages" in fields:
        return "supervised"
    if "trajectories" in fields:
        return "grpo"
    return "dpo" if {"input", "preferred_output", "non_preferred_output"} & set(fields) else None


def grpo_jsonl(groups: Sequence[Sequence[Trajectory]]) -> bytes:
    """The training file of the method `grpo`, one line a group. Raises TrainingError as `of_group`."""
    rows = (GrpoRow.of_group(group).model_dump(mode="json", exclude_none=True) for group in groups if group)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _row_of(trajectory: Trajectory) -> GrpoTrajectory:
    facts = trajectory.metadata or {}
    turns = []
    for item in trajectory.episode:
        if not isinstance(item, EpisodeItem):
            raise TrainingError("GRPO trains on episodes, and found a preference (DPOItem)")
        if item.role is not EpisodeItemRole.ASSISTANT or (item.metadata or {}).get("given"):
            continue
        if item.token_ids is None or item.context_ids is None or not item.logprobs:
            raise TrainingError(
                f"episode {facts.get('episode', '?')} has no token ids and logprobs, which GRPO needs; "
                "sample it with an engine that returns them"
            )
        turns.append(
            GrpoTurn(
                context_ids=item.context_ids,
                token_ids=item.token_ids,
                logprobs=tuple(float(value) for value in item.logprobs),
                temperature=float((item.metadata or {}).get("temperature", 1.0)),
            )
        )
    shaped = tuple(trajectory.shaped_rewards) if trajectory.shaped_rewards else None
    episode = facts.get("episode")
    return GrpoTrajectory(
        turns=tuple(turns),
        reward=trajectory.reward,
        shaped_rewards=shaped,
        episode=None if episode is None else str(episode),
    )


def _trajectory_of(row: GrpoTrajectory, place: int) -> Trajectory:
    items = [
        EpisodeItem(
            role=EpisodeItemRole.ASSISTANT,
            content="",
            logprobs=turn.logprobs,
            token_ids=turn.token_ids,
            context_ids=turn.context_ids,
            metadata={"temperature": turn.temperature},
        )
        for turn in row.turns
    ]
    return Trajectory(
        episode=items,
        reward=row.reward,
        shaped_rewards=None if row.shaped_rewards is None else list(row.shaped_rewards),
        metadata={"episode": row.episode if row.episode is not None else f"#{place}"},
    )
