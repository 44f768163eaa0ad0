"""Trajectories to a training batch, one pure function per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from etude.core.errors import TrainingError
from etude.core.message import OpenAIMessage
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.learner.advantage import AdvantageScale, group_advantages, turn_advantages
from etude.learner.batch import TokenSequence, TrainingBatch

Tokenise = Callable[[list[OpenAIMessage] | str, str], tuple[tuple[int, ...], tuple[int, ...]]]
"""Prompt and response texts to their token ids, for preferences that were never sampled here."""

Written = Callable[[str], tuple[int, ...]]
"""An answer's text to its token ids, end of turn included."""


def grpo_batch(collection: TrajectoryCollection, scale: AdvantageScale = "std") -> TrainingBatch:
    """Every trajectory a unit, its advantage by group; with step rewards, by group and turn.

    Branches of one episode count as one episode in the group's mean, and share its advantage.
    """
    units = []
    for group in collection.trajectories:
        for trajectory, advantages in zip(group, _advantages(group, scale), strict=True):
            units.append((_sequence(trajectory, advantages),))
    return TrainingBatch(tuple(units))


def supervised_batch(collection: TrajectoryCollection, written: Written | None = None) -> TrainingBatch:
    """Every trajectory a unit; all sampled tokens count the same.

    `written` gives the tokens of an answer that a builder put in the place of the sampled one.
    """
    return TrainingBatch(
        tuple(
            (_sequence(trajectory, [1.0] * len(_sampled_items(trajectory)), written),)
            for group in collection.trajectories
            for trajectory in group
        )
    )


def dpo_batch(collection: TrajectoryCollection, tokenise: Tokenise) -> TrainingBatch:
    """Every preference a unit of (chosen, rejected)."""
    units = []
    for group in collection.trajectories:
        for trajectory in group:
            for item in trajectory.episode:
                if not isinstance(item, DPOItem):
                    raise TrainingError(
                        "DPO trains on preferences (DPOItem), and found an episode; use builder dpo"
                    )
                units.append(
                    _preference(item, tokenise, float((trajectory.metadata or {}).get("temperature", 1.0)))
                )
    return TrainingBatch(tuple(units))


def _sampled_items(trajectory: Trajectory) -> list[EpisodeItem]:
    """The assistant items that the policy sampled: not those that the agent wrote into a prompt itself."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    return [
        item
        for item in items
        if item.role is EpisodeItemRole.ASSISTANT and not (item.metadata or {}).get("given")
    ]


def _advantages(group: Sequence[Trajectory], scale: AdvantageScale) -> list[list[float]]:
    """One advantage per sampled item of each trajectory."""
    if any(trajectory.shaped_rewards for trajectory in group):
        shaped = [list(t.shaped_rewards or [t.reward] * len(_sampled_items(t))) for t in group]
        return turn_advantages(shaped, scale)
    episodes: dict[Any, float] = {}
    for index, trajectory in enumerate(group):
        episodes.setdefault(_episode_of(trajectory, index), trajectory.reward)
    values = dict(zip(episodes, group_advantages(list(episodes.values()), scale), strict=True))
    return [
        [values[_episode_of(trajectory, index)]] * len(_sampled_items(trajectory))
        for index, trajectory in enumerate(group)
    ]


def _episode_of(trajectory: Trajectory, index: int) -> Any:
    return (trajectory.metadata or {}).get("episode", index)


def _sequence(
    trajectory: Trajectory, advantages: Sequence[float], written: Written | None = None
) -> TokenSequence:
    ids: list[int] = []
    weights: list[float] = []
    spread: list[float] = []
    logprobs: list[float] = []
    temperatures: set[float] = set()
    for item, advantage in zip(_sampled_items(trajectory), advantages, strict=True):
        if written is not None and item.token_ids is None and (item.metadata or {}).get("replaced"):
            tokens = written(item.content)
            item = item.model_copy(update={"token_ids": tokens, "logprobs": (0.0,) * len(tokens)})
        if item.token_ids is None or item.context_ids is None or item.logprobs is None:
            where = (trajectory.metadata or {}).get("episode", "?")
            raise TrainingError(
                f"episode {where} has no token ids, which training needs; sample it with an engine that "
                "returns them (llms _type: local, or openai with return_token_ids: true)"
            )
        given, sampled = len(item.context_ids), len(item.token_ids)
        ids += [*item.context_ids, *item.token_ids]
        weights += [0.0] * given + [1.0] * sampled
        spread += [0.0] * given + [advantage] * sampled
        logprobs += [0.0] * given + [float(value) for value in item.logprobs]
        temperatures.add(float((item.metadata or {}).get("temperature", 1.0)) or 1.0)
    if len(temperatures) > 1:
        raise TrainingError(f"one trajectory was sampled at several temperatures: {sorted(temperatures)}")
    return TokenSequence(
        tuple(ids),
        tuple(weights),
        tuple(spread),
        tuple(logprobs),
        temperatures.pop() if temperatures else 1.0,
    )


def _preference(item: DPOItem, tokenise: Tokenise, temperature: float) -> tuple[TokenSequence, TokenSequence]:
    def side(
        response: str,
        ids: tuple[int, ...] | None,
        logprobs: tuple[float, ...] | None,
        mask: tuple[bool, ...] | None,
    ) -> TokenSequence:
        prompt = item.prompt_ids
        if prompt is None or ids is None:
            prompt, ids = tokenise(item.prompt, response)
            logprobs, mask = None, None
        given = (0.0,) * len(prompt)
        chosen = tuple(float(trained) for trained in mask) if mask else (1.0,) * len(ids)
        return TokenSequence(
            ids=prompt + ids,
            weights=given + chosen,
            advantages=given + (1.0,) * len(ids),
            logprobs=given + (logprobs or (0.0,) * len(ids)),
            temperature=temperature or 1.0,
        )

    return (
        side(item.chosen_response, item.chosen_ids, item.chosen_logprobs, item.chosen_mask),
        side(item.rejected_response, item.rejected_ids, item.rejected_logprobs, item.rejected_mask),
    )
