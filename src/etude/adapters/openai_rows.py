"""Trajectories as the rows of OpenAI's fine-tuning files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.errors import CapabilityError, TrainingError
from etude.core.message import Message
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection

_KEPT = ("tool_calls", "tool_call_id", "name")


def jsonl(collection: TrajectoryCollection) -> bytes:
    """The content of the training file.

    Raises CapabilityError for data that the API has no rows for, TrainingError for malformed ones.
    """
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of(collection))
    return "".join(rows).encode()


def rows_of(collection: TrajectoryCollection) -> Iterator[dict[str, Any]]:
    """The rows, one for each trajectory to imitate, or for each preference. Raises as `jsonl`."""
    for group in collection.trajectories:
        for trajectory in group:
            if collection.method == "supervised":
                yield supervised_row(trajectory)
            elif collection.method == "dpo":
                yield from (dpo_row(item, trajectory.metadata or {}) for item in trajectory.episode)
            else:
                raise CapabilityError(f"the API has no training files for the method '{collection.method}'")


def supervised_row(trajectory: Trajectory) -> dict[str, Any]:
    """`{"messages": […]}`; what the agent wrote for the assistant itself has the weight 0."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    row: dict[str, Any] = {"messages": [_message(item) for item in items]}
    tools = (trajectory.metadata or {}).get("tools")
    return row | {"tools": tools} if tools else row


def dpo_row(item: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`{"input": …, "preferred_output": […], "non_preferred_output": […]}`. Raises as `jsonl`."""
    if not isinstance(item, DPOItem):
        raise TrainingError("DPO trains on preferences (DPOItem), and found an episode; use builder dpo")
    if facts.get("turns", 1) > 1:
        raise CapabilityError(
            "OpenAI's DPO compares two answers to one prompt, and a pair has several turns; "
            "set 'compare: turns' in the builder 'dpo', or use 'malt'"
        )
    prompt = item.prompt
    messages = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [one.to_wire() for one in prompt]
    )
    return {
        "input": {"messages": messages},
        "preferred_output": [{"role": "assistant", "content": item.chosen_response}],
        "non_preferred_output": [{"role": "assistant", "content": item.rejected_response}],
    }


def _message(item: EpisodeItem) -> Message:
    facts = item.metadata or {}
    message: Message = {"role": item.role.value, "content": facts.get("content", item.content)}
    message |= {key: facts[key] for key in _KEPT if key in facts}
    if item.role is EpisodeItemRole.ASSISTANT and facts.get("given"):
        message["weight"] = 0
    return message
