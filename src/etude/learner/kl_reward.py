"""A price in the reward for moving away from the reference (Ziegler et al., 2019).

The reward of an episode becomes r - β·Σ (log π_sampled - log π_ref), over all tokens that were sampled in it,
before it is compared with those of its group. With a reward for each turn, a turn pays for itself and for
those after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from etude.core.trajectory import Trajectory, TrajectoryCollection
from etude.learner.batch import TokenSequence
from etude.learner.collate import episode_of, turn_sequences

Divergences = Callable[[Sequence[TokenSequence]], list[float]]
"""For each sequence the sum of log π_sampled - log π_ref over its trained tokens."""


def with_kl_in_rewards(
    collection: TrajectoryCollection, beta: float, divergences: Divergences
) -> tuple[TrajectoryCollection, float]:
    """The collection with that reward, and the mean divergence of its trajectories in nats.

    Branches of one episode share its reward, and so the price of them all.
    """
    turns = [[turn_sequences(one) for one in group] for group in collection.trajectories]
    found = iter(divergences([turn for group in turns for one in group for turn in one]))
    by_turn = [[[next(found) for _ in one] for one in group] for group in turns]
    groups = [
        _group(group, of_turns, beta)
        for group, of_turns in zip(collection.trajectories, by_turn, strict=True)
    ]
    total = math.fsum(value for group in by_turn for one in group for value in one)
    return collection.model_copy(update={"trajectories": groups}), total / max(len(collection), 1)


def _group(group: Sequence[Trajectory], by_turn: Sequence[Sequence[float]], beta: float) -> list[Trajectory]:
    of_episode: dict[Any, float] = defaultdict(float)
    for index, (one, values) in enumerate(zip(group, by_turn, strict=True)):
        of_episode[episode_of(one, index)] += math.fsum(values)
    made = []
    for index, (one, values) in enumerate(zip(group, by_turn, strict=True)):
        priced: dict[str, Any] = {"reward": one.reward - beta * of_episode[episode_of(one, index)]}
        if one.shaped_rewards:
            from_here_on = [*accumulate(reversed(values))][::-1]
            priced["shaped_rewards"] = [
                reward - beta * value for reward, value in zip(one.shaped_rewards, from_here_on, strict=True)
            ]
        made.append(one.model_copy(update=priced))
    return made
