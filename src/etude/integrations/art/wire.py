"""Trajectories in OpenPipe ART's JSON: groups, trajectories, messages and choices. Pure functions.

The shapes match `art.trajectories` 0.4.11 and 0.5.17. Each release ignores the fields that only the other
has. A message that the model sampled is an OpenAI `Choice` with logprobs, and ART trains on it. Every other
message is a plain dict.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat

from etude.core.conversion import TrajectoryCollection
from etude.core.errors import CapabilityError, TrainingError
from etude.core.message import Tool
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.integrations.art.config import ARTTrainerAdapterConfig

Json = dict[str, Any]

FLAT = "group without differing rewards"


@dataclass(frozen=True, slots=True)
class ArtGroups:
    """The groups of a job, and counts of the trajectories that were left out."""

    groups: list[Json]
    trajectories: int
    rejected: dict[str, int] = field(default_factory=dict)
    """The number of trajectories that were left out, by reason."""


class ArtModel(BaseModel):
    """ART's `TrainableModel`. ART has defaults for its other fields."""

    name: str
    project: str
    trainable: bool = True
    base_model: str
    internal_config: Json = Field(serialization_alias="_internal_config")
    """ART's `InternalModelConfig`."""

    @classmethod
    def from_config(cls, config: ARTTrainerAdapterConfig) -> ArtModel:
        """Describe the model that a config trains."""
        backend, training = config.backend, config.training
        options = {"learning_rate": training.learning_rate, "beta": training.beta}
        internal = {
            "trainer_args": options | training.trainer_args,
            "init_args": backend.init_args,
            "engine_args": backend.engine_args,
        }
        return cls(
            name=backend.name,
            project=backend.project,
            base_model=backend.base_model,
            internal_config={key: value for key, value in internal.items() if value is not None},
        )


class ArtTrajectory(BaseModel):
    """ART's `Trajectory`: the messages of an episode, and its reward."""

    messages_and_choices: list[Json] = Field(default_factory=list)
    """Messages, and the choices that the model sampled among them."""
    tools: list[Tool] | None = None
    additional_histories: list[Any] = Field(default_factory=list)
    reward: FiniteFloat = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: Json = Field(default_factory=dict)
    metadata: Json = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)


class ArtGroup(BaseModel):
    """ART's `TrajectoryGroup`: the trajectories of one example."""

    trajectories: list[ArtTrajectory] = Field(default_factory=list)
    exceptions: list[Any] = Field(default_factory=list)
    metadata: Json = Field(default_factory=dict)
    metrics: Json = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)


def to_art_groups(collection: TrajectoryCollection) -> ArtGroups:
    """Return the collection as ART's groups, without the trajectories that ART cannot train on.

    Raises CapabilityError for step rewards, which ART does not support. Raises TrainingError if nothing is
    left, because an ART server would report such a batch as done.
    """
    rejected: Counter[str] = Counter()
    groups: list[Json] = []
    for group in collection.trajectories:
        kept: list[ArtTrajectory] = []
        for trajectory in group:
            if trajectory.shaped_rewards is not None:
                raise CapabilityError(
                    "ART trains with one reward for a whole trajectory, and there are step rewards; leave "
                    "them out, or choose the adapter 'local'"
                )
            try:
                check_episode_order(trajectory)
                kept.append(to_art_trajectory(trajectory))
            except ValueError as error:
                rejected[str(error)] += 1
        # The server skips groups with equal rewards silently, but counts the step.
        if len({each.reward for each in kept}) > 1:
            groups.append(ArtGroup(trajectories=kept).model_dump())
        elif kept:
            rejected[FLAT] += len(kept)
    count = sum(len(group["trajectories"]) for group in groups)
    if not groups:
        reasons = "; ".join(f"{number} × {reason}" for reason, number in rejected.most_common())
        raise TrainingError(
            f"job {collection.run_id}: ART can train on no trajectory of the batch: "
            f"{reasons or 'it is empty'}. Nothing was submitted."
        )
    return ArtGroups(groups, count, dict(rejected))


def check_episode_order(trajectory: Trajectory) -> None:
    """Raise ValueError unless the items are in an order that ART can train on.

    Items are system, user, assistant and tool messages. The first is a system or user message, the last an
    assistant message. Only system and tool messages may follow one of the same role. A tool message follows
    an assistant or tool message.
    """
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    roles = [item.role for item in items]
    if not roles:
        raise ValueError("it has no messages")
    others = sorted({str(role) for role in roles} - {"system", "user", "assistant", "tool"})
    if others:
        raise ValueError(f"it has messages of the role {', '.join(others)}")
    if roles[0] not in (EpisodeItemRole.SYSTEM, EpisodeItemRole.USER):
        raise ValueError(f"its first message is of the role {roles[0]}, not system or user")
    if roles[-1] is not EpisodeItemRole.ASSISTANT:
        raise ValueError(f"its last message is of the role {roles[-1]}, not assistant")
    # System messages may repeat, as in the reference. Results of parallel tool calls repeat too.
    may_repeat = (EpisodeItemRole.SYSTEM, EpisodeItemRole.TOOL)
    answering = (EpisodeItemRole.ASSISTANT, EpisodeItemRole.TOOL)
    for before, after in pairwise(roles):
        if before is after and after not in may_repeat:
            raise ValueError(f"it has consecutive {after} messages")
        if after is EpisodeItemRole.TOOL and before not in answering:
            raise ValueError(f"a tool message follows a {before} message")


def to_art_trajectory(trajectory: Trajectory, *, needs_tokens: bool = True) -> ArtTrajectory:
    """Return ART's `Trajectory`. Raises ValueError if an answer lacks its token ids or logprobs.

    Without `needs_tokens`, such an answer keeps its logprobs in OpenAI's format, or has none.
    """
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    # ART trains on a whole choice. An answer with zero weight becomes a plain message.
    sampled = [item for item in items if item.is_sampled and (item.weights is None or any(item.weights))]
    if not sampled:
        raise ValueError("it has no message that the model sampled, or none to train on")
    facts = trajectory.metadata or {}
    return ArtTrajectory(
        messages_and_choices=[
            _choice(item, needs_tokens) if item in sampled else _message(item) for item in items
        ],
        tools=trajectory.tools or None,
        reward=trajectory.reward,
        initial_policy_version=sampled[0].model_version or 0,
        final_policy_version=sampled[-1].model_version or 0,
        metadata={key: value for key, value in facts.items() if isinstance(value, str | int | float | bool)},
    )


def _choice(item: EpisodeItem, needs_tokens: bool) -> Json:
    try:
        logprobs: Json | None = _logprobs(item)
    except ValueError:
        if needs_tokens:
            raise
        own = item.logprobs.model_dump() if isinstance(item.logprobs, BaseModel) else item.logprobs
        logprobs = own if isinstance(own, dict) and own.get("content") else None
    return {
        "index": 0,
        "finish_reason": item.finish_reason,
        "logprobs": logprobs,
        "message": {"refusal": None, **_message(item)},
    }


def _logprobs(item: EpisodeItem) -> Json:
    """Return the sampled tokens by id, in vLLM's notation, which ART's tokeniser reads."""
    ids, logprobs = item.token_ids, item.logprobs
    if not ids:
        raise ValueError("an answer has no token ids")
    if not isinstance(logprobs, tuple | list) or len(logprobs) != len(ids):
        raise ValueError("an answer has no logprobs for its tokens")
    content = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _message(item: EpisodeItem) -> Json:
    facts = item.metadata or {}
    names = ("tool_calls", "tool_call_id", "name", "function_call", "refusal")
    kept = {key: facts[key] for key in names if key in facts}
    return {"role": item.role.value, "content": facts.get("content", item.content), **kept}


def make_group(trajectories: list[Trajectory]) -> ArtGroup:
    """Return an example's trajectories, with OpenAI's `Choice` for each answer that is trained on.

    Raises ValueError for a trajectory that ART cannot train on.
    """
    from openai.types.chat.chat_completion import Choice

    group = ArtGroup()
    for trajectory in trajectories:
        check_episode_order(trajectory)
        made = to_art_trajectory(trajectory, needs_tokens=False)
        said = made.messages_and_choices
        choices = [Choice.model_validate(each) if "finish_reason" in each else each for each in said]
        group.trajectories.append(made.model_copy(update={"messages_and_choices": choices}))
    return group
