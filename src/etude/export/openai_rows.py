"""Rows as OpenAI's fine-tuning API takes them: `supervised` and `dpo`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.algorithms.samples import Branch, branches_of
from etude.core.edge import parted
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.message import Message
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory
from etude.export.trajectories import PhaseTrajectories
from etude.store.episodes import read_episode
from etude.store.files import draft_of
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data, target_names, trained_parts

SEVERAL_TURNS = "pair whose answers take several turns: OpenAI's format has one reply on each side"

_ROLES = {EpisodeItemRole.ENVIRONMENT: "user", EpisodeItemRole.OTHER: "user"}
_KEPT = ("tool_calls", "tool_call_id", "name", "refusal")


_Pair = tuple[list[Message], list[Message], list[Message], list[Any]]
"""Prompt, chosen messages, rejected messages, tools."""


@dataclass(slots=True)
class Written:
    """Counts of the rows that were written, and of trajectories that the format has no row for."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


async def write_openai(path: Path, run: RunFolder, phases: AsyncIterator[PhaseTrajectories]) -> Written:
    """A line for each trajectory of the methods `supervised` and `dpo`. Raises StoreError."""
    written = Written()

    def episode(name: str) -> EpisodeRecord | None:
        return read_episode(run.journal, name)

    with draft_of(path) as draft, draft.open("w", encoding="utf-8") as file:
        async for phase in phases:
            for trajectory in (each for group in phase.collection.trajectories for each in group):
                row = row_of(trajectory, phase, episode)
                if row is None:
                    written.left_out[SEVERAL_TURNS] += 1
                    continue
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                written.rows += 1
    return written


def row_of(
    trajectory: Trajectory, phase: PhaseTrajectories, episode: Callable[[str], EpisodeRecord | None]
) -> dict[str, Any] | None:
    """The row of a trajectory; None when the format has no place for it.

    `episode` reads a stored episode by its id: a pair's replies are taken from there as they were.
    """
    if phase.collection.method != "dpo":
        return supervised_row(trajectory)
    pair = next(item for item in trajectory.episode if isinstance(item, DPOItem))
    prompt, chosen, rejected, tools = _stored_pair(trajectory, phase, episode) or _written_pair(pair)
    if len(chosen) != 1 or len(rejected) != 1:
        return None
    source: dict[str, Any] = {"messages": prompt}
    if tools:
        source |= {"tools": tools, "parallel_tool_calls": True}
    return {"input": source, "preferred_output": chosen, "non_preferred_output": rejected}


def supervised_row(trajectory: Trajectory) -> dict[str, Any]:
    """`messages`, and `tools` where there were any. Replies that were not sampled have the weight 0."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    row: dict[str, Any] = {"messages": [_message(item) for item in items]}
    return row | {"tools": trajectory.tools} if trajectory.tools else row


def _message(item: EpisodeItem) -> Message:
    facts = item.metadata or {}
    extras = {key: facts[key] for key in _KEPT if facts.get(key) is not None}
    content = facts.get("content", item.content)
    message: Message = {"role": _ROLES.get(item.role, str(item.role)), "content": content, **extras}
    if extras.get("tool_calls") and not content:
        message["content"] = None
    if item.given:
        message["weight"] = 0
    return message


def _stored_pair(
    trajectory: Trajectory, phase: PhaseTrajectories, episode: Callable[[str], EpisodeRecord | None]
) -> _Pair | None:
    """A pair as the stored episodes have it; None where the builder does not say which those are."""
    facts = trajectory.metadata or {}
    names = [facts.get("chosen_episode"), facts.get("rejected_episode")]
    records = [episode(name) for name in names if isinstance(name, str)]
    branches: list[Branch] = []
    for record in records:
        candidates = branches_of(record, phase.target_functions, phase.target_model) if record else []
        branches += [branch for branch in candidates if branch.index == facts.get("branch")]
    if len(branches) != 2:
        return None
    return *parted(*(branch.messages for branch in branches)), list(branches[0].calls[-1].request.tools)


def _written_pair(pair: DPOItem) -> _Pair:
    """A pair as its texts have it."""
    prompt = pair.prompt
    messages: list[Message] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [message.to_wire() for message in prompt]
    )
    chosen: Message = {"role": "assistant", "content": pair.chosen_response}
    rejected: Message = {"role": "assistant", "content": pair.rejected_response}
    return messages, [chosen], [rejected], []


def require_openai_method(run: Path, method: str | None) -> None:
    """Raise RequestError when a run's own trajectories are for a method without such rows."""
    data = stored_data(run)
    made = [method] if method else [trained_parts(data, name)["method"] for name in target_names(data)]
    if "grpo" in made:
        raise RequestError(
            "OpenAI's rows are for supervised and dpo training, and these trajectories are for grpo; "
            "add --method supervised (the best episodes) or --method dpo (better against worse)"
        )
