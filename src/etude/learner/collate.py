"""Trajectories to a training batch, one pure function per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
            units.append((_sequence(trajectory, advantages, needs_logprobs=True),))
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


def dpo_batch(
    collection: TrajectoryCollection, tokenise: Tokenise, *, needs_logprobs: bool = False
) -> TrainingBatch:
    """Every preference a unit of (chosen, rejected).

    Raises TrainingError for a preference without the sampler's logprobs where `needs_logprobs`.
    """
    units = []
    for group in collection.trajectories:
        for trajectory in group:
            for item in trajectory.episode:
                if not isinstance(item, DPOItem):
                    raise TrainingError(
                        "DPO trains on preferences (DPOItem), and found an episode; use builder dpo"
                    )
                units.append(_preference(item, tokenise, _temperature(trajectory.metadata), needs_logprobs))
    return TrainingBatch(tuple(units))


def turn_sequences(trajectory: Trajectory) -> list[TokenSequence]:
    """For each sampled message of a trajectory, all up to it, and only it to be trained on."""
    whole = _sequence(trajectory, [1.0] * len(_sampled_items(trajectory)), needs_logprobs=True)
    turns, end = [], 0
    for item in _sampled_items(trajectory):
        start = end + len(item.context_ids or ())
        end = start + len(item.token_ids or ())
        weights = (0.0,) * start + whole.weights[start:end]
        turns.append(
            TokenSequence(
                whole.ids[:end],
                weights,
                weights,
                whole.logprobs[:end],
                whole.temperatures[:end],
            )
        )
    return turns


def episode_of(trajectory: Trajectory, index: int) -> Any:
    """What the branches of one episode have in common, for the trajectory at `index` of its group."""
    return (trajectory.metadata or {}).get("episode", index)


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
        episodes.setdefault(episode_of(trajectory, index), trajectory.reward)
    values = dict(zip(episodes, group_advantages(list(episodes.values()), scale), strict=True))
    return [
        [values[episode_of(trajectory, index)]] * len(_sampled_items(trajectory))
        for index, trajectory in enumerate(group)
    ]


def _sequence(
    trajectory: Trajectory,
    advantages: Sequence[float],
    written: Written | None = None,
    *,
    needs_logprobs: bool = False,
) -> TokenSequence:
    ids: list[int] = []
    weights: list[float] = []
    spread: list[float] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    items = _sampled_items(trajectory)
    if len(items) != len(advantages):
        raise TrainingError(
            f"{_told(trajectory)} has {len(advantages)} shaped rewards for {len(items)} sampled messages"
        )
    for item, advantage in zip(items, advantages, strict=True):
        if written is not None and item.token_ids is None and (item.metadata or {}).get("replaced"):
            tokens = written(item.content)
            item = item.model_copy(update={"token_ids": tokens, "logprobs": (0.0,) * len(tokens)})
        if item.token_ids is None or item.context_ids is None or item.logprobs is None:
            raise TrainingError(
                f"{_told(trajectory)} has no token ids, which training needs; sample it with an engine that "
                "returns them (llms _type: local, or openai with return_token_ids: true)"
            )
        given, sampled = len(item.context_ids), len(item.token_ids)
        known = item.logprobs if item.logprobs or needs_logprobs else (0.0,) * sampled
        if len(known) != sampled:
            raise TrainingError(f"{_told(trajectory)} has {len(known)} logprobs for {sampled} sampled tokens")
        ids += [*item.context_ids, *item.token_ids]
        weights += [0.0] * given + [1.0] * sampled
        spread += [0.0] * given + [advantage] * sampled
        logprobs += [0.0] * given + [float(value) for value in known]
        temperatures += [_temperature(item.metadata)] * (given + sampled)
    return TokenSequence(tuple(ids), tuple(weights), tuple(spread), tuple(logprobs), tuple(temperatures))


def _temperature(facts: Mapping[str, Any] | None) -> float:
    """The temperature that logprobs are under: greedy samples have those of the model itself."""
    return float((facts or {}).get("temperature", 1.0)) or 1.0


def _told(trajectory: Trajectory) -> str:
    return f"episode {(trajectory.metadata or {}).get('episode', '?')}"


def _preference(
    item: DPOItem, tokenise: Tokenise, temperature: float, needs_logprobs: bool
) -> tuple[TokenSequence, TokenSequence]:
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
        if not logprobs and needs_logprobs:
            raise TrainingError(
                "a preference has no logprobs of the policy that sampled it, which is DPO's reference; set "
                "'dpo: {reference: base}' in the trainer adapter"
            )
        given = (0.0,) * len(prompt)
        chosen = tuple(float(trained) for trained in mask) if mask else (1.0,) * len(ids)
        if len(chosen) != len(ids) or len(logprobs or ids) != len(ids):
            raise TrainingError("a preference has a mask or logprobs of another length than its token ids")
        return TokenSequence(
            ids=prompt + ids,
            weights=given + chosen,
            advantages=given + (1.0,) * len(ids),
            logprobs=given + (logprobs or (0.0,) * len(ids)),
            temperatures=(temperature,) * (len(prompt) + len(ids)),
        )

    return (
        side(item.chosen_response, item.chosen_ids, item.chosen_logprobs, item.chosen_mask),
        side(item.rejected_response, item.rejected_ids, item.rejected_logprobs, item.rejected_mask),
    )
