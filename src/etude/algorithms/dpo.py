"""Pairs of episodes of one example, or of answers to one prompt, where one is preferred: DPO and MALT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, Field, FiniteFloat

from etude.algorithms.algorithm import Algorithm, OfCollection
from etude.algorithms.collecting import Need
from etude.algorithms.plays import Choice, by_agent, find_choices
from etude.algorithms.samples import Group, Tally, UnitGroup, is_play, make_pair, same_prompt
from etude.config.builder import Builder
from etude.config.component import ReferenceTo
from etude.core.errors import RequestError, TrainingError
from etude.core.sample import Kind, Pair, Sample
from etude.protocols.branching import check_widths, most_calls
from etude.protocols.workflow import ProtocolWorkflow

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch

TIE = "pair with equal rewards"
TOO_CLOSE = "pair whose rewards differ by less than min_reward_diff"
SAME_RESPONSE = "pair of equal responses"
OTHER_PROMPT = "pair of episodes that began with different prompts"
OVER_LIMIT = "pair beyond max_pairs_per_group"
NO_PAIR = "turn without answers on both sides of the threshold"
SAME_ANSWER = "pair of equal answers"
NO_CHOICE = "episode in which no prompt has several answers (protocols need `widths`, malt `num_responses`)"

_TOLERANCE = 1e-9
"""Makes 0.3 - 0.1 count as a difference of 0.2."""

T = TypeVar("T")


class Preferences(Algorithm, name=""):
    """Base of algorithms that learn from pairs: the options of the loss, and the loss.

    DPO (Rafailov et al., 2023): L = -log σ(β·m). Here m is Σ(log π - log π_ref) of the chosen minus the same
    sum of the rejected.
    """

    kind: ClassVar[Kind] = "pairs"
    loss_parts: ClassVar[tuple[str, ...]] = ("loss", "weight_factors", "pair_loss")

    beta: FiniteFloat = Field(0.1, gt=0)
    """Set how strongly preferences pull away from the reference."""
    reference: Literal["sampler", "base"] = "sampler"
    """Choose the reference: the policy that sampled the pairs, or the base model."""

    def choices(self, group: Group, tally: Tally) -> Iterator[Choice]:
        """Yield the prompts of episodes with several answers to compare."""
        for scored in group:
            found = list(find_choices(scored))
            tally.leave_out(NO_CHOICE, int(not found))
            yield from found

    def needs(self) -> set[Need]:
        """Return the needed logprobs. The sampler's come with the data; the base model's must be computed."""
        return {"logprobs"} if self.reference == "sampler" else {"reference"}

    def weight_factors(self, units: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Return factors of 1. The weights stay masks, because a response counts by its sum."""
        return [[1.0] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean of `pair_loss` over pairs. The rows of a pair are neighbours."""
        import torch

        reference_BT = batch.sampled_BT if batch.reference_BT is None else batch.reference_BT
        gain_B = ((logprobs_BT - reference_BT) * batch.weights_BT).sum(dim=1)
        margin_P = gain_B[0::2] - gain_B[1::2]
        with torch.no_grad():
            metrics = {
                "preferred": float((margin_P > 0).float().sum()) * batch.unit_share,
                "margin": float(self.beta * margin_P.sum()) * batch.unit_share,
            }
        losses_P = self.pair_loss(margin_P)
        if losses_P.shape != margin_P.shape:
            what = f"shape {[*losses_P.shape]} for {len(margin_P)} pairs; return the loss of each"
            raise TrainingError(f"{type(self).__qualname__}.pair_loss returned a tensor of {what}")
        return losses_P.sum() * batch.unit_share, metrics

    def pair_loss(self, margin_P: torch.Tensor) -> torch.Tensor:
        """Return the loss of each of P pairs, by how much more the policy now prefers the chosen one."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * margin_P)


class Dpo(Preferences, name="dpo"):
    """Pairs of episodes, or of answers to one prompt, for DPO."""

    compare: OfCollection[Literal["episodes", "turns"]] = "episodes"
    """Compare episodes of an example by their rewards, or answers to one prompt within an episode. In a
    protocol answers count by their value, elsewhere by the step reward after each."""
    min_reward_diff: OfCollection[float] = Field(default=0.01, gt=0)
    """Leave out pairs whose rewards differ by less. Ties are always left out."""
    max_pairs_per_group: OfCollection[int | None] = Field(default=None, ge=1)
    """Keep at most this many pairs of an example (with `compare: turns`, of a prompt): the clearest ones. 1
    keeps the best with the worst."""

    def check(self) -> None:
        """Raise RequestError for groups that can never have a pair."""
        super().check()
        if self.compare == "episodes" and self.num_generations == 1:
            raise RequestError(
                "num_generations: 1 makes groups of one episode, in which there is no pair, so DPO "
                "would learn nothing. Ask for at least 2; 8 is usual."
            )

    def groups(self, episodes: Sequence[Group], tally: Tally) -> list[UnitGroup]:
        """Return a group of pairs for each example, judged by the rewards of its episodes or answers."""
        if self.compare == "episodes":
            return super().groups(episodes, tally)
        parts = [part for group in episodes for part in self.parts(group, tally)]
        return [UnitGroup.from_pairs(self.samples(part, tally)) for part in parts]

    def parts(self, group: Group, tally: Tally) -> list[Group]:
        """Return a group for each agent if turns of plays are compared, since payoffs are per agent."""
        plays = [scored for scored in group if is_play(scored.episode)]
        return [*by_agent(plays)] if self.compare == "turns" and plays else super().parts(group, tally)

    def samples(self, group: Group, tally: Tally) -> Sequence[Pair]:
        """Return the pairs of a group, largest reward difference first; pairs of answers by turn."""
        if self.compare == "turns":
            pairs: list[Pair] = []
            for samples, _ in self.choices(group, tally):
                answers = self._rank_pairs(samples, lambda sample: sample.reward, tally)
                pairs += self._limit_pairs([make_pair(*both) for both in answers], tally)
            return pairs
        found: list[Pair | None] = []
        for better, worse in self._rank_pairs(group, lambda scored: scored.reward, tally):
            # A pair for each branch that both episodes have and that began with the same prompt.
            for chosen, rejected in zip(better.samples(), worse.samples(), strict=False):
                if same_prompt(chosen, rejected):
                    found.append(make_pair(chosen, rejected))
                else:
                    tally.left_out[OTHER_PROMPT] += 1
        return self._limit_pairs(found, tally)

    def _rank_pairs(self, items: Sequence[T], value: Callable[[T], float], tally: Tally) -> list[tuple[T, T]]:
        """Return the pairs that differ enough, better one first, sorted by largest difference."""
        order = sorted(items, key=lambda item: -value(item))
        kept: list[tuple[T, T]] = []
        for better, worse in combinations(order, 2):
            if value(better) == value(worse):
                tally.left_out[TIE] += 1
            elif value(better) - value(worse) < self.min_reward_diff - _TOLERANCE:
                tally.left_out[TOO_CLOSE] += 1
            else:
                kept.append((better, worse))
        return sorted(kept, key=lambda pair: value(pair[1]) - value(pair[0]))

    def _limit_pairs(self, pairs: Sequence[Pair | None], tally: Tally) -> list[Pair]:
        """Drop pairs without a difference, and pairs beyond the limit."""
        different = [pair for pair in pairs if pair is not None]
        kept = different[: self.max_pairs_per_group]
        tally.leave_out(SAME_RESPONSE, len(pairs) - len(different))
        tally.leave_out(OVER_LIMIT, len(different) - len(kept))
        return kept


class Malt(Preferences, name="malt"):
    """Pairs of answers to one prompt in a protocol, for DPO (Motwani et al., 2024).

    Every turn of a play is answered several times, and good answers are preferred to bad ones. An answer's
    value is what its agent earned with it, plus the mean value of its children.
    """

    num_generations: int = Field(1, ge=1, le=1000, validation_alias=AliasChoices("num_generations", "group"))
    """Set the number of plays for each example of an epoch."""
    credit: Literal["episode", "agent"] = "agent"
    """Always `agent`: an answer is worth what its agent earned."""
    num_responses: int | list[int] | Annotated[dict[str, int | list[int]], ReferenceTo("agents")] | None = 2
    """Set the number of answers for each turn: a number, a list by round, or either of them by agent. Leave
    it empty for the workflow's setting."""
    interval: float | None = Field(default=None, ge=0, lt=1)
    """Pair two answers whose values differ by more than this share of what the agent can earn. Left out: pair
    an answer at or above the mid-point of that range with one below it."""

    def objective(self) -> Dpo:
        """Return `dpo` with the same options."""
        return Dpo(beta=self.beta, reference=self.reference)

    @property
    def widths(self) -> Any:
        """The answers for each turn."""
        return self.num_responses

    async def check_protocol(self, builder: Builder) -> None:
        """Raise RequestError if the protocol does not say what agents can earn."""
        played = None if builder.config.workflow is None else (await builder.get_workflow()).fn
        if not isinstance(played, ProtocolWorkflow):
            return
        widths = played.widths if self.widths is None else self.widths
        check_widths(widths, played.protocol.agents)
        if most_calls(played.protocol, widths) == most_calls(played.protocol, 1):
            raise RequestError("malt compares the answers of a turn, and each has one: raise `num_responses`")
        if not played.protocol.bounds:
            text = f"malt compares with what agents can earn: the protocol '{played.protocol.name}'"
            raise RequestError(f"{text} needs `bounds`")

    def groups(self, episodes: Sequence[Group], tally: Tally) -> list[UnitGroup]:
        """Return the pairs of each agent and example, judged by answer values."""
        parts = [part for group in episodes for part in by_agent(group)]
        return [UnitGroup.from_pairs(self.samples(part, tally)) for part in parts]

    def samples(self, group: Group, tally: Tally) -> Sequence[Pair]:
        """Return the pairs of one agent in the plays of a group: the clearest of each prompt."""
        pairs: list[Pair] = []
        for samples, bounds in self.choices(group, tally):
            answers = sorted(samples, key=lambda sample: -sample.reward)
            ranked = [pair for pair in combinations(answers, 2) if self._differ(*pair, bounds)]
            if not ranked:
                tally.left_out[NO_PAIR] += 1
            for better, worse in sorted(ranked, key=lambda pair: pair[1].reward - pair[0].reward):
                if (pair := make_pair(better, worse)) is not None:
                    pairs.append(pair)
                    break
                tally.left_out[SAME_ANSWER] += 1
        return pairs

    def _differ(self, better: Sample, worse: Sample, bounds: tuple[float, float] | None) -> bool:
        """Return whether the rule allows a pair."""
        low, high = bounds or (0.0, 0.0)
        if self.interval is None:
            return better.reward >= (low + high) / 2 - _TOLERANCE > worse.reward
        return better.reward - worse.reward > self.interval * (high - low) + _TOLERANCE
