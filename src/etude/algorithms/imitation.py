"""Which episodes to imitate: by threshold, by rank, or drawn by weight; and guesses put right."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.algorithms.branches import Branch
from etude.algorithms.plays import is_play, tree_of
from etude.algorithms.scored import Group, ScoredEpisode, Tally
from etude.core.errors import RequestError
from etude.core.trajectory import EpisodeItem, Trajectory

BELOW = "episode with a reward below min_reward"
NOT_BEST = "episode that is not among its group's best"
NO_BEST = "group with equal rewards: no episode is better than another"
NOT_DRAWN = "episode that was not drawn"

REPLACED = "replaced"
"""In the metadata of an item: its text was not sampled, and a backend makes its tokens."""


class WeightingConfig(BaseModel):
    """Drawing episodes by weight. The weight is the reward above the least, and a little for everybody."""

    model_config = ConfigDict(extra="forbid")

    sample_size_factor: float = Field(
        default=0.5, gt=0, description="How many are drawn, as a share of all episodes."
    )
    minimum: float | None = Field(
        default=None, description="Reward that counts as the least; left out: the least that there is."
    )
    use_replacement: bool = Field(default=True, description="Whether an episode can be drawn twice.")
    epsilon: float = Field(
        default=0.01, ge=0, description="Added to the share of each episode, divided by their number."
    )


class GuessReplacementConfig(BaseModel):
    """In a protocol: some episodes are imitated with the verifier's decision replaced by the truth."""

    model_config = ConfigDict(extra="forbid")

    proportion: float = Field(default=0.0, ge=0, le=1, description="Share of the episodes, at first.")
    annealing: Literal["none", "linear", "exponential"] = Field(
        default="none", description="How the share falls from epoch to epoch."
    )
    annealing_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="`linear`: what it falls by. `exponential`: the part of it that is lost.",
    )

    def share(self, epoch: int) -> float:
        """The share in an epoch, from 0."""
        match self.annealing:
            case "none":
                return self.proportion
            case "linear":
                return max(self.proportion - epoch * self.annealing_rate, 0.0)
            case "exponential":
                return self.proportion * (1 - self.annealing_rate) ** epoch


def best_episodes(
    group: Group, min_reward: float | None, best_k: int | None, tally: Tally
) -> list[ScoredEpisode]:
    """The episodes of a group to imitate, best first.

    Without `min_reward` a group whose rewards are all equal is left out: its best is also its worst.
    Equal rewards are told apart by generation.
    """
    if min_reward is None:
        best_k = best_k or 1
        if len({scored.reward for scored in group}) == 1:
            tally.left_out[NO_BEST] += 1
            return []
    good = [scored for scored in group if min_reward is None or scored.reward >= min_reward]
    kept = sorted(good, key=lambda scored: -scored.reward)[:best_k]
    if len(good) < len(group):
        tally.left_out[BELOW] += len(group) - len(good)
    if len(kept) < len(good):
        tally.left_out[NOT_BEST] += len(good) - len(kept)
    return kept


def draw(rewards: Sequence[float], config: WeightingConfig, rng: random.Random) -> list[int]:
    """Indices of the rewards that are drawn, in order; with replacement one may be there twice.

    Equal rewards have equal weights. None are drawn from none.
    """
    if not rewards:
        return []
    least = min(rewards) if config.minimum is None else config.minimum
    above = [max(reward - least, 0.0) for reward in rewards]
    total, count = math.fsum(above), len(rewards)
    weights = [(one / total if total > 0 else 1 / count) + config.epsilon / count for one in above]
    size = round(count * config.sample_size_factor)
    if config.use_replacement:
        return sorted(rng.choices(range(count), weights, k=size))
    # Efraimidis and Spirakis (2006): the largest of u ** (1 / w) are a weighted draw without replacement.
    keys = [math.log(1.0 - rng.random()) / weight if weight > 0 else -math.inf for weight in weights]
    drawable = [index for index, weight in enumerate(weights) if weight > 0]
    return sorted(sorted(drawable, key=lambda index: -keys[index])[: min(size, count)])


@dataclass(frozen=True, slots=True)
class Guess:
    """An agent's decision in a play, and what should have been said in its place."""

    branch: Branch
    """It ends with the decision."""
    right: str
    """The answer that gives the right verdict, as the play's scenario reads it."""


def guess_of(scored: ScoredEpisode) -> Guess | None:
    """The decision in a play that goes one way only; None where there is no play, or nobody decided.

    Raises RequestError when the scenario reads no answer as the right verdict.
    """
    if not is_play(scored.episode):
        return None
    tree = tree_of(scored.episode)
    if len(list(tree.leaves())) != 1:
        return None
    decided = {node.call: node for node in tree.nodes if node.decision is not None}
    branch = next((branch for branch in scored.branches if branch.calls[-1].index in decided), None)
    if branch is None:
        return None
    node = decided[branch.calls[-1].index]
    if node.guess is None:
        raise RequestError(
            f"episode {scored.episode.id!r}: the scenario reads no answer of '{node.agent}' as the right "
            "verdict, so that its guess cannot be replaced; give the scenario a `write_decision`"
        )
    return Guess(branch, node.guess)


def with_truth(trajectory: Trajectory, guess: Guess) -> Trajectory:
    """The trajectory with the truth for its last answer, which was not sampled and has no tokens yet."""
    *before, last = trajectory.episode
    assert isinstance(last, EpisodeItem)
    facts = {key: value for key, value in (last.metadata or {}).items() if key != "finish_reason"}
    replaced = last.model_copy(
        update={
            "content": guess.right,
            "token_ids": None,
            "logprobs": (),
            "metadata": facts | {REPLACED: True},
        }
    )
    return trajectory.model_copy(
        update={
            "episode": [*before, replaced],
            "metadata": (trajectory.metadata or {}) | {"guess_replaced": True},
        }
    )
