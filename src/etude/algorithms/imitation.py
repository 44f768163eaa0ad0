"""Imitation of all episodes, or of good ones (expert iteration).

Good ones are chosen by threshold or rank (Anthony et al., 2017; on a model's own answers: rejection sampling,
Yuan et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.samples import Group, ScoredEpisode, Tally, is_play, read_tree
from etude.core.errors import RequestError
from etude.core.sample import Kind, Sample

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch


class Supervised(Algorithm, name="supervised"):
    """Every episode for supervised training.

    L = -Σ w·log π / Σ w: the mean negative log-likelihood of the sampled tokens.
    """

    kind: ClassVar[Kind] = "imitation"

    def check(self) -> None:
        """Raise RequestError for a penalty on rewards, because rewards are not used."""
        if self.cut_off_penalty and type(self) is Supervised:
            raise RequestError(
                f"{self.type_name} imitates all episodes, and cut_off_penalty is subtracted from "
                "what they earn; take `cut_off: mask`"
            )
        super().check()

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the class's formula, which is also the metric `nll`."""
        loss = -(batch.weights_BT * logprobs_BT).sum()
        return loss, {"nll": float(loss.detach())}


BELOW = "episode with a reward below min_reward"
NOT_BEST = "episode that is not among its group's best"
NO_BEST = "group with equal rewards: no episode is better than another"


class ExpertIteration(Supervised, name="expert_iteration"):
    """Good episodes for supervised training."""

    min_reward: float | None = None
    """Keep episodes with at least this reward."""
    best_k: int | None = Field(default=None, ge=1)
    """Keep the best k episodes of each example. Without min_reward the default is 1."""

    def objective(self) -> Supervised:
        """Return `supervised`."""
        return Supervised()

    def samples(self, group: Group, tally: Tally) -> list[Sample]:
        """Return the samples of the episodes to imitate, best first.

        Without `min_reward`, a group with equal rewards is left out: its best is also its worst. Ties go to
        the lower generation.
        """
        best_k = self.best_k
        if self.min_reward is None:
            best_k = best_k or 1
            if len({scored.reward for scored in group}) == 1:
                tally.left_out[NO_BEST] += 1
                return []
        good = [scored for scored in group if self.min_reward is None or scored.reward >= self.min_reward]
        kept = sorted(good, key=lambda scored: -scored.reward)[:best_k]
        tally.leave_out(BELOW, len(group) - len(good))
        tally.leave_out(NOT_BEST, len(good) - len(kept))
        return [sample for scored in kept for sample in scored.samples(self.discount)]


def true_decision(scored: ScoredEpisode) -> Sample | None:
    """Return a play's sample with the true decision, which was not sampled and has no tokens yet.

    None if the episode is no play, branches, or has no decision. Raises RequestError if the scenario reads no
    answer as the right verdict.
    """
    if not is_play(scored.episode):
        return None
    tree = read_tree(scored.episode)
    if len(list(tree.leaves())) != 1:
        return None
    decided = [node for node in tree.nodes if node.decision is not None]
    made = scored.samples()
    ends = ((one, node) for one in made for node in decided if node.call == one.turns[-1].call)
    sample, node = next(ends, (None, None))
    if sample is None or node is None:
        return None
    last = sample.turns[-1]
    if node.guess is None:
        raise RequestError(
            f"episode {scored.episode.id!r}: the scenario reads no answer of '{node.agent}' as the right "
            "verdict, so its guess cannot be replaced; give the scenario a `write_decision`"
        )
    cut = slice(0, last.start)
    return replace(
        sample,
        ids=sample.ids[cut],
        mask=sample.mask[cut],
        logprobs=None if sample.logprobs is None else sample.logprobs[cut],
        turns=(*sample.turns[:-1], replace(last, stop=last.start, finish_reason="stop", replaced=True)),
        messages=(*sample.messages[: last.message], {"role": "assistant", "content": node.guess}),
        notes={**sample.notes, "guess_replaced": True},
    )
