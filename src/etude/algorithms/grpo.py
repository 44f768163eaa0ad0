"""GRPO: each episode of an example compared with its siblings, by a clipped policy gradient.

Shao et al. (2024), DeepSeekMath. An episode's advantage compares its reward with the rewards of the example's
other episodes. The named variants choose among the same few options.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, model_validator

from etude.algorithms.algorithm import Algorithm, OfCollection
from etude.algorithms.collecting import Need
from etude.algorithms.plays import answers_of_group
from etude.algorithms.samples import Group, Tally, UnitGroup
from etude.core.errors import RequestError, TrainingError
from etude.core.sample import Sample, SampleOrPair

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch

GROUP_OF_ONE = "group of one episode: nothing to compare it with"
NO_ADVANTAGE = "group in which no episode has an advantage"

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {},
    "grpo": {"clip_high": 0.2, "beta": 0.04, "aggregation": "sequence"},
    "dr_grpo": {"clip_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence", "ratio": "sequence"},
    # The best bound found by Khatri et al. (2025). Theirs is on the ratio itself: 5.
    "cispo": {"clip_high": 4.0, "surrogate": "cispo"},
}
"""The variants' differences from the default options: DAPO (Yu et al., 2025), GRPO (Shao et al., 2024), Dr.
GRPO (Liu et al., 2025), GSPO (Zheng et al., 2025) and CISPO (MiniMax, 2025)."""


class Grpo(Algorithm, name="grpo"):
    """Groups of episodes for GRPO.

    L = -Σ w·v·min(r·A, clip(r, 1-ε_low, 1+ε_high)·A) + β·Σ w·(e^d - d - 1) + η·Σ w·v·c·log π

    Here r = π/π_sampled, v = 1 and d = log π_ref - log π. The constant c = min(r, 1+ε_high)·log π gives the
    last term, over what the policy samples, the gradient of -η times its entropy. With `cispo` the first sum
    is over w·v·min(r, 1+ε_high)·A·log π, with r as a constant. With a correction, v is the bounded
    π_start/π_sampled and r = π/π_start. π_start is the policy at the job's start (Hilton et al., 2022).
    """

    loss_parts: ClassVar[tuple[str, ...]] = ("loss", "weight_factors", "importance")

    credit: Literal["episode", "agent", "turn"] = "episode"  # type: ignore[assignment]
    """`episode`: all agents have the episode's reward. `agent`: each agent of the model is compared with
    itself in other episodes, by its payoff in a protocol or its measured score "reward". `turn`: the same for
    each answer, by its earnings from then on, in plays that do not branch."""
    drop_flat_groups: OfCollection[bool] = True
    """Leave out groups without an advantage, unless another term of the loss learns from them."""
    variant: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """Choose a named set of the options below. You can still change each of them."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """ε_low: bounds the ratio to the weights at the job's start. That ratio is 1 in a job of one step."""
    clip_high: FiniteFloat = Field(0.28, gt=0)
    """ε_high: the upper bound of the same ratio (clip-higher, DAPO)."""
    beta: FiniteFloat = Field(0.0, ge=0)
    """Set the weight of the KL to the base model."""
    entropy_bonus: FiniteFloat = Field(0.0, ge=0)
    """Set the weight η of the policy's entropy. Like `beta`, it also acts on groups without an advantage."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Average over all tokens (DAPO), per sequence (GRPO), or divide by a constant (Dr. GRPO)."""
    constant_length: int = Field(256, ge=1)
    """Set the constant of `aggregation: constant`, in tokens."""
    ratio: Literal["token", "sequence"] = "token"
    """Use a ratio for each token, or one for the whole sequence (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """Clip the ratio (PPO), or truncate it and keep every token's gradient (CISPO)."""
    advantage_scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation (GRPO), or not (Dr. GRPO)."""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """Weight tokens that other weights or another engine sampled. `truncate`: bounded importance weights
    (truncated importance sampling, Yao et al., 2025). `mask`: 0 beyond the bound (Zheng et al., 2025).
    `none`: no weights; the clipped ratio is to the sampler's logprobs."""
    correction_cap: FiniteFloat = Field(2.0, ge=1)
    """Set the upper bound of these importance weights."""

    @model_validator(mode="before")
    @classmethod
    def _apply_variant(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(name := given.get("variant", "dapo"), str):
            return given
        return {**VARIANTS.get(name, {}), **given}

    def check(self) -> None:
        """Raise RequestError for groups that can never have an advantage."""
        super().check()
        compares = type(self).advantages is Grpo.advantages and not any(self.compare([1.0]))
        drops = self.drop_flat_groups and self.skips_idle
        if self.num_generations == 1 and self.credit != "turn" and compares and drops:
            raise RequestError(
                "num_generations: 1 makes groups of one episode, which have no advantage, so "
                f"{self.type_name} would learn nothing. Ask for at least 2; 8 is usual."
            )

    def groups(self, episodes: Sequence[Group], tally: Tally) -> list[UnitGroup]:
        """Return a group for each example, and for each agent unless the credit is the episode's.

        Groups without an advantage are counted, and by default have no samples.
        """
        if self.credit != "turn":
            made = super().groups(episodes, tally)
        else:
            parts = (part for group in episodes for part in self.parts(group, tally))
            answers = (answers_of_group(part, self.discount, tally) for part in parts)
            made = [UnitGroup(each, [sample.reward for sample in each]) for each in answers]
        if not (self.drop_flat_groups and self.skips_idle):
            return made
        for index, is_compared in enumerate(self.find_comparable(made)):
            if not is_compared:
                flat = made[index]
                reason = GROUP_OF_ONE if len(flat.rewards or ()) == 1 else NO_ADVANTAGE
                tally.leave_out(reason, len(flat.units[:1]))
                made[index] = replace(flat, units=[])
        return made

    def teaches(self, groups: Sequence[Sequence[Sample]]) -> bool:
        """Return whether any sample of a job has an advantage, or an entropy bonus teaches it."""
        return self.entropy_bonus > 0 or super().teaches(groups)

    @property
    def skips_idle(self) -> bool:
        """Whether units without an advantage have no gradient: false with a KL or an entropy bonus."""
        return not self.entropy_bonus and super().skips_idle

    def compare(self, rewards: Sequence[float]) -> list[float]:
        """Return the advantages of a group's rewards: minus their mean, scaled; 0 for equal rewards."""
        mean = math.fsum(rewards) / max(len(rewards), 1)
        centred = [reward - mean for reward in rewards]
        deviation = math.sqrt(math.fsum(value * value for value in centred) / max(len(rewards), 1))
        # Rounding can leave a tiny deviation among equal rewards, which must not be scaled up to 1.
        flat = deviation <= 1e-9 * max(1.0, abs(mean))
        scale = 1.0 if self.advantage_scale == "none" else deviation
        return [0.0 if flat else value / scale for value in centred]

    def advantages(self, group: Sequence[Sample]) -> list[list[float]]:
        """Return one advantage per turn: the episode's, or with step rewards the turn's.

        Each turn is then compared with the same turn of other episodes. An agent's branches are one course of
        turns, in the order of their calls.
        """
        names = [index if sample.episode is None else sample.episode for index, sample in enumerate(group)]
        if not any(sample.returns for sample in group):
            rewards = {name: sample.reward for name, sample in zip(names, group, strict=True)}
            by_name = dict(zip(rewards, self._gains([*rewards.values()]), strict=True))
            return [[by_name[name]] * len(sample.turns) for name, sample in zip(names, group, strict=True)]
        courses: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
        for index, (name, sample) in enumerate(zip(names, group, strict=True)):
            functions = (turn.function for turn in sample.turns[:1])
            courses[name, sample.agent, *functions] += [(index, turn) for turn in range(len(sample.turns))]
        for course in courses.values():
            course.sort(key=lambda place: group[place[0]].turns[place[1]].call or 0)
        values = [sample.returns or [sample.reward] * len(sample.turns) for sample in group]
        for turn in range(max(map(len, courses.values()))):
            places = [course[turn] for course in courses.values() if len(course) > turn]
            gains = self._gains([values[index][number] for index, number in places])
            for (index, number), gain in zip(places, gains, strict=True):
                values[index][number] = gain
        return values

    def _gains(self, rewards: Sequence[float]) -> list[float]:
        gains = self.compare(rewards)
        if len(gains) != len(rewards):
            counts = f"one number for each reward, and it gave {len(gains)} for {len(rewards)}"
            raise TrainingError(f"{self.type_name}: `compare` gives {counts}")
        return gains

    def needs(self) -> set[Need]:
        """Return the needed data: the options for KL and correction each need their own."""
        wants: dict[Need, bool] = {"reference": self.beta > 0, "start": self.correction != "none"}
        return {"logprobs", *(need for need, is_wanted in wants.items() if is_wanted)}

    def units(self, groups: Sequence[Sequence[SampleOrPair]]) -> list[tuple[Sample, ...]]:
        """Return all units of a job in the learner's form. Raises TrainingError without advantages, which
        would teach all answers alike."""
        units = super().units(groups)
        if type(self).loss is Grpo.loss and any(each.advantages is None for unit in units for each in unit):
            raise TrainingError(f"{self.type_name} gives samples no advantages, which etude.Grpo.loss needs")
        return units

    def weight_factors(self, units: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Return factors that make sums a mean over tokens, over samples' token means, or Dr. GRPO's."""
        masses = [[sum(sample.loss_weights) for sample in unit] for unit in units]
        rows = sum(1 for unit in masses for mass in unit if mass)
        if self.aggregation == "token":
            return super().weight_factors(units)
        if self.aggregation == "constant":
            return [[1.0 / (rows * self.constant_length)] * len(unit) for unit in masses]
        return [[1.0 / (rows * mass) if mass else 0.0 for mass in unit] for unit in masses]

    def importance(self, start_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return v [B, T] of the class's formula, and the metrics of the cut tokens.

        `start_BT` is log π/π_sampled at the job's start, without gradient, and 0 for untrained tokens.
        """
        if self.correction == "none":
            return start_BT.new_ones(start_BT.shape), {}
        ratio_BT = start_BT.exp()
        out_BT = ratio_BT > self.correction_cap
        bounded_BT = ratio_BT.clamp(max=self.correction_cap)
        weights_BT = ratio_BT.masked_fill(out_BT, 0.0) if self.correction == "mask" else bounded_BT
        return weights_BT, {"out_of_bounds": out_BT}

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the class's formula. Metrics are means over the trained tokens."""
        import torch

        trained_BT = batch.weights_BT > 0
        lengths_B1 = trained_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = torch.where(trained_BT, logprobs_BT - batch.sampled_BT, 0.0)
        now_BT = log_ratio_BT.detach()
        before_BT = logprobs_BT.detach() if batch.start_BT is None else batch.start_BT
        start_BT = torch.where(trained_BT, before_BT - batch.sampled_BT, 0.0)
        importance_BT, metrics = self.importance(start_BT)
        metrics["sampled_kl"] = now_BT.exp() - 1 - now_BT
        from_BT = log_ratio_BT if self.correction == "none" else log_ratio_BT - start_BT
        token_BT = from_BT.detach().exp().clamp(max=1 + self.clip_high)
        if self.ratio == "sequence":
            from_BT = (from_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(from_BT)
        ratio_BT, advantages_BT = from_BT.exp(), batch.advantages_BT
        cut_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_BT
        gain_BT = torch.minimum(ratio_BT * advantages_BT, cut_BT)
        metrics["clip_fraction"] = ratio_BT * advantages_BT > cut_BT
        if self.surrogate == "cispo":
            bounded_BT = ratio_BT.detach().clamp(max=1 + self.clip_high)
            gain_BT = bounded_BT * advantages_BT * logprobs_BT
            metrics["clip_fraction"] = ratio_BT > 1 + self.clip_high
        if self.entropy_bonus:
            gain_BT = gain_BT - self.entropy_bonus * token_BT * logprobs_BT.detach() * logprobs_BT
        loss = -(batch.weights_BT * importance_BT * gain_BT).sum()
        if batch.reference_BT is not None:
            gap_BT = torch.where(trained_BT, batch.reference_BT - logprobs_BT, 0.0)
            kl_BT = gap_BT.exp() - gap_BT - 1
            loss = loss + self.beta * (batch.weights_BT * kl_BT).sum()
            metrics["reference_kl"] = kl_BT.detach()
        share = batch.token_share
        return loss, {name: float((of_BT * trained_BT).sum()) * share for name, of_BT in metrics.items()}


class Rloo(Grpo, name="rloo"):
    """Groups of episodes for RLOO (REINFORCE leave-one-out, Ahmadian et al., 2024).

    An episode's advantage is its reward minus the mean reward of its siblings. Its loss is summed over its
    tokens: `aggregation: constant` with a `constant_length` of 1. Ratios are clipped as in PPO.
    """

    clip_high: FiniteFloat = Field(0.2, gt=0)
    """ε_high: the upper bound of the clipped ratio."""
    aggregation: Literal["token", "sequence", "constant"] = "constant"
    """Average over all tokens, per sequence, or divide by a constant."""
    constant_length: int = Field(1, ge=1)
    """Set the constant of `aggregation: constant`, in tokens."""
    advantage_scale: Literal["std", "none"] = "none"
    """Divide by the group's standard deviation, or not."""

    def compare(self, rewards: Sequence[float]) -> list[float]:
        """Return each reward minus the others' mean, which is its distance to the mean times n / (n - 1)."""
        factor = len(rewards) / max(len(rewards) - 1, 1)
        return [value * factor for value in super().compare(rewards)]


class ReinforcePP(Grpo, name="reinforce_pp"):
    """Episodes for REINFORCE++ (Hu, 2025).

    A token's advantage is its episode's reward, normalised over all sampled tokens of the batch to mean 0 and
    deviation 1. With `baseline` (REINFORCE++-baseline) the group's mean is subtracted first. This suits
    several episodes for each example.
    """

    baseline: bool = False
    """Subtract the group's mean before normalising."""
    drop_flat_groups: OfCollection[bool] = False
    """Leave out groups in which no episode has an advantage over the others. Without a `baseline`, their
    episodes do have an advantage, over the batch."""

    def find_comparable(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """Return for each group whether any sample has an advantage over the others in the group."""
        within = self.model_copy(update={"baseline": True})
        return [bool(group.units) and within.has_advantage(group.samples) for group in groups]

    def compare(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards themselves, or with `baseline` their distance to the group's mean."""
        mean = math.fsum(rewards) / max(len(rewards), 1) if self.baseline else 0.0
        return [reward - mean for reward in rewards]

    def assign_advantages(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Return the samples with advantages normalised over all their sampled tokens."""
        assigned = super().assign_advantages(groups)
        if any(sample.advantages is not None for group in groups for sample in group):
            return assigned
        samples = [sample for group in assigned for sample in group]
        rows = [zip(sample.mask, sample.advantages or (), strict=False) for sample in samples]
        values = [value for row in rows for sampled, value in row if sampled]
        mean = math.fsum(values) / max(len(values), 1)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1))
        scale = 0.0 if deviation <= 1e-9 * max(1.0, abs(mean)) else 1 / deviation

        def normalise(sample: Sample) -> Sample:
            pairs = zip(sample.mask, sample.advantages or (), strict=True)
            gains = ((value - mean) * scale if sampled else 0.0 for sampled, value in pairs)
            return replace(sample, advantages=tuple(gains))

        return [[*map(normalise, group)] for group in assigned]
