"""Trajectories as the rows of OpenAI's fine-tuning files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.core.edge import message_of, sample_of
from etude.core.episode import Example
from etude.core.errors import CapabilityError, TrainingError
from etude.core.message import Message, OpenAIMessage, Tool
from etude.core.training_rows import GrpoRow
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection


def jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of a training file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def rows_of(collection: TrajectoryCollection) -> Iterator[dict[str, Any]]:
    """One row for each trajectory to imitate, for each preference, or for each group of GRPO.

    Raises CapabilityError for data that there are no rows for, TrainingError for malformed data.
    """
    kind = kind_of(collection.method)
    for group in collection.trajectories:
        if kind == "samples" and group:
            yield grpo_row(group)
        for trajectory in group if kind != "samples" else ():
            if kind == "imitation":
                yield supervised_row(trajectory)
            else:
                yield from (dpo_row(item, trajectory.tools) for item in trajectory.episode)


def grpo_row(group: Sequence[Trajectory]) -> dict[str, Any]:
    """`{"trajectories": […]}`: a group with the token ids and logprobs of what was sampled."""
    row = GrpoRow.of_group([sample_of(trajectory) for trajectory in group])
    return row.model_dump(mode="json", exclude_none=True)


def reinforcement_row(group: Sequence[Trajectory], example: Example | None) -> dict[str, Any]:
    """`{"messages": […], "expected": …, "inputs": {…}}`: the prompt of a group, for OpenAI to answer.

    Raises CapabilityError where one answer to one prompt is not all that there is.
    """
    items = [item for item in group[0].episode if isinstance(item, EpisodeItem)]
    sampled = [index for index, item in enumerate(items) if item.is_sampled]
    if len(sampled) != 1 or items[sampled[0] - 1].role is not EpisodeItemRole.USER:
        raise CapabilityError(
            "OpenAI's reinforcement fine-tuning answers a user's message once, and an episode has "
            f"{len(sampled)} answers; train agents with tools or several turns with another adapter"
        )
    row: dict[str, Any] = {"messages": [message_of(item) for item in items[: sampled[0]]]}
    if example is not None:
        row |= {"expected": example.expected, "inputs": dict(example.inputs)}
    return row


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a row that a model reads: contents, and what tool calls and tools say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("role", "id", "type", "tool_call_id"):
                yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def supervised_row(trajectory: Trajectory) -> dict[str, Any]:
    """`{"messages": […]}`; what the agent wrote for the assistant itself has the weight 0."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    row: dict[str, Any] = {"messages": [message_of(item) for item in items]}
    return row | {"tools": trajectory.tools} if trajectory.tools else row


def dpo_row(item: Any, tools: Sequence[Tool] | None = None) -> dict[str, Any]:
    """`{"input": …, "preferred_output": […], "non_preferred_output": […]}`. Raises as `rows_of`."""
    if not isinstance(item, DPOItem):
        raise TrainingError("DPO trains on preferences (DPOItem), and found an episode; use builder dpo")
    chosen, rejected = item.chosen_message, item.rejected_message
    if item.turns > 1 and (chosen is None or rejected is None):
        raise CapabilityError(
            "DPO over the fine-tuning API compares two answers to one prompt, and a pair has several turns; "
            "set 'compare: turns' in the builder 'dpo', or use 'malt'"
        )
    prompt = item.prompt
    messages = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [message.to_wire() for message in prompt]
    )
    return {
        "input": {"messages": messages}
        | ({"tools": list(tools), "parallel_tool_calls": True} if tools else {}),
        "preferred_output": [_reply(chosen, item.chosen_response)],
        "non_preferred_output": [_reply(rejected, item.rejected_response)],
    }


def _reply(message: OpenAIMessage | None, text: str) -> Message:
    return {"role": "assistant", "content": text} if message is None else message.to_wire()
