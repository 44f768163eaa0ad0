"""ART's model, trajectories and groups of them, with the attributes that its own package gives them.

The package itself is not needed: its classes are pydantic models of these fields.
"""

from __future__ import annotations

from typing import Any

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, Field

from etude.core.trajectory import Trajectory
from etude.integrations.art.wire import Json, check_episode_order, trajectory_of


class ArtTrajectory(BaseModel):
    """ART's `Trajectory`: what was said in an episode, and its reward."""

    messages_and_choices: list[Any]
    """A `Choice` of OpenAI's for each answer that is trained on; other messages as they are on the wire."""
    reward: float
    tools: list[Json] | None = None
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    additional_histories: list[Any] = Field(default_factory=list)


class ArtTrajectoryGroup(BaseModel):
    """ART's `TrajectoryGroup`: the trajectories of one example."""

    trajectories: list[ArtTrajectory]
    exceptions: list[Any] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)


def group_of(trajectories: list[Trajectory]) -> ArtTrajectoryGroup:
    """The trajectories of an example as ART has them. Raises ValueError for one that it could not take."""
    return ArtTrajectoryGroup(trajectories=[_trajectory(each) for each in trajectories])


def _trajectory(trajectory: Trajectory) -> ArtTrajectory:
    check_episode_order(trajectory)
    wire = trajectory_of(trajectory, needs_tokens=False)
    said = [
        Choice.model_validate(each) if "finish_reason" in each else each
        for each in wire["messages_and_choices"]
    ]
    return ArtTrajectory.model_validate({**wire, "messages_and_choices": said})
