"""The alarms that ship with Etude: checks of metrics against thresholds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from etude.core.episode import cut_off_share
from etude.core.history import Entry, ValidationEntry
from etude.loop.alarm import REMEDIES, Alarm, Sighting, Sightings
from etude.store.figures import with_rewards

_MANY_EQUAL = 5
"""If at least this many rewards are equal and have no interval, the reward itself is its bound."""
_FEW = 0.05
"""If fewer answers than this share get the full reward, the advice is to show examples."""
_RECENT, _SHORT = 5, 32
"""Earlier epochs that the length is compared with, and the mean length in tokens that is always allowed."""


class Mismatch(Alarm, name="mismatch"):
    """The learner and the engine give sampled tokens different probabilities (`training.mismatch_kl` of the
    metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["learner-and-engine-differ"]

    above: float = Field(default=0.05, gt=0)
    """The largest allowed difference, in nats per token. Rounding causes small differences, and with
    `collect_ahead` so does the update in between."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        divergence = (entry.metrics.get("training") or {}).get("mismatch_kl")
        if divergence is None:
            return None
        if divergence <= self.above:
            return ""
        return f"learner and engine differ by {divergence:.3g} nats a token (mismatch_kl)"


class CutOffAnswers(Alarm, name="cut_off_answers"):
    """Many answers are cut off at the token limit (`cut_off_share` of the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["answers-are-cut-off"]

    above: float = Field(default=0.2, ge=0, lt=1)
    """The share of all answers that may be cut off."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        calls = entry.metrics.get("calls") or {}
        return self.seen_in(calls) if calls.get("answers") else None

    def seen_in(self, calls: Mapping[str, int]) -> str:
        """Return a sentence if too many of the counted answers were cut off, else an empty string."""
        share = cut_off_share(calls)
        if share is None or share <= self.above:
            return ""
        counts = f"{calls['cut_off']} of {calls['answers']} answers ({100 * share:.0f} %)"
        return f"{counts} were cut off at the token limit"


class EntropyCollapse(Alarm, name="entropy_collapse"):
    """The entropy of sampled tokens (`sampled_entropy` of the metrics) is far below its value in the first
    epoch. The reward is not yet in the top tenth of its range so far."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["all-attempts-are-alike"]

    epochs: int = Field(default=2, ge=1)
    """How many epochs in a row must have the fault before the alarm rings."""
    below: float = Field(default=0.05, gt=0, lt=1)
    """The alarm rings if the entropy is below this share of the first epoch's entropy."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        entropy = entry.metrics.get("sampled_entropy")
        if entropy is None:
            return None
        known = (each.metrics.get("sampled_entropy") for each in earlier)
        first = next((value for value in known if value is not None), None)
        if first is None or entropy >= self.below * first or _has_learnt(entry, earlier):
            return ""
        return f"the entropy of sampled tokens has collapsed to {entropy:.3g} nats a token from {first:.3g}"


class LengthExplosion(Alarm, name="length_explosion"):
    """Answers are several times as long as in earlier epochs (`answer_tokens` of the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "the model may have found that long answers pay, or has stopped ending them: read some, and see "
        "whether the reward or a penalty for cut off answers should say otherwise"
    )

    above: float = Field(default=3.0, gt=1)
    """The largest allowed multiple of the median of the five epochs before. 32 tokens are always allowed."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        length = entry.metrics.get("answer_tokens")
        if length is None:
            return None
        known = [value for each in earlier if (value := each.metrics.get("answer_tokens")) is not None]
        if not known or length <= _SHORT:
            return ""
        usual = statistics.median(known[-_RECENT:])
        if length <= self.above * usual:
            return ""
        return f"answers have {length:.1f} tokens on average, where they had {usual:.1f} before"


class RewardCollapse(Alarm, name="reward_collapse"):
    """The reward has fallen below an earlier one, and their intervals do not overlap."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["the-reward-falls"]

    of: Literal["first", "best"] = "first"
    """The earlier reward to compare with: the first, or the best so far."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        known = with_rewards(earlier)
        if entry.metrics.get("avg_reward") is None:
            return None
        if not known:
            return ""
        before = known[0] if self.of == "first" else max(known, key=lambda each: each.metrics["avg_reward"])
        high, low = _reward_bound(entry, "reward_high"), _reward_bound(before, "reward_low")
        if high is None or low is None or high >= low:
            return ""
        end, start = (f"{each.reward} ({each.measured_on})" for each in (entry, before))
        model = "the model" if entry.measured_with is None else f"v{entry.measured_with}"
        first = f"v{before.measured_with}" if before.measured_with else "the model that training began with"
        if "target" in entry.metrics:
            meaning = f"{model} may be worse than {first}, or the others have improved"
        elif isinstance(entry, ValidationEntry):
            meaning = f"{model} is worse than {first}"
        else:
            meaning = f"{model} may be worse than {first}, or the examples of the epoch harder"
        return f"the reward has collapsed to {end} from {start}: {meaning}"


class PartialReward(Alarm, name="partial_reward"):
    """The mean reward is clearly above the first one, but the best reward is not, and no more answers get the
    full reward. The model learns to earn a part of the reward instead of doing the task."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["a-part-of-the-reward-is-farmed"]

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        first = next(iter(with_rewards(earlier)), None)
        now = entry.distribution
        before = None if first is None else first.distribution
        if now is None or first is None or before is None:
            return None
        mean, high = first.metrics["avg_reward"], first.metrics["reward_high"]
        reward = entry.metrics["avg_reward"]
        full = before.best if now.full is None else now.full
        if reward <= (mean if high is None else high) or now.best > before.best:
            return ""
        if now.best_share(full) > before.best_share(full):
            return ""
        return f"the mean reward has risen from {mean:.3f} to {reward:.3f}, and the best has not: {now}"


class EqualGroups(Alarm, name="equal_groups"):
    """In most groups no episode has an advantage over the others (`reward_groups` of the metrics), for
    example because all rewards are equal. The reward is not yet in the top tenth of its range so far."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["most-groups-are-flat"]

    at_least: float = Field(default=0.8, gt=0, le=1)
    """The alarm rings if at least this share of the groups has no advantages."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        groups = entry.metrics.get("reward_groups") or {}
        if not groups.get("compared"):
            return None
        compared, flat = groups["compared"], groups["flat"]
        if flat < self.at_least * compared or _has_learnt(entry, earlier):
            return {}
        which = f"each of the {compared} groups" if flat == compared else f"{flat} of {compared} groups"
        rewards = entry.distribution
        shown = "" if rewards is None else f" (rewards {rewards.shown_bars()})"
        text = f"within {which} no episode has an advantage over the others{shown}"
        right = None if rewards is None or rewards.full is None else rewards.best_share(rewards.full)
        symptom = "most-groups-are-flat"
        if right is not None and not _FEW <= right < 1:
            symptom = "no-answer-is-right" if right < _FEW else "nothing-is-left-to-learn"
        return {"": Sighting(text, remedy=REMEDIES[symptom])}


class TemplateDrift(Alarm, name="template_drift"):
    """Many training sequences begin in the middle of a conversation. The chat template wrote its earlier
    messages in other tokens than before (`drifted` of `branches` in the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "each of them reads the conversation anew, which costs time and tells the model other tokens than it "
        "said: `etude check` shows which messages the template writes differently"
    )

    above: float = Field(default=0.1, ge=0, lt=1)
    """The share of all training sequences that may begin in this way."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        branches, drifted = entry.metrics.get("branches"), entry.metrics.get("drifted")
        if not branches or drifted is None:
            return None
        if drifted <= self.above * branches:
            return ""
        causes = (entry.metrics.get("drift") or {}).items()
        listed = ", ".join(f"{count} × {cause}" for cause, count in sorted(causes, key=lambda pair: -pair[1]))
        return (
            f"{drifted} of {branches} training sequences ({100 * drifted / branches:.0f} %) did not extend "
            f"their conversation{listed and f' ({listed})'}"
        )


class Failures(Alarm, name="failures"):
    """Episodes, or scores of an evaluator, have failed. Each cause (`failure_causes` of the metrics) is
    checked separately. `finetuning.error_budget` sets the share of failures that ends the run."""

    by_default: ClassVar[bool] = True

    above: int = Field(default=0, ge=0)
    """How many failures of one cause are allowed in an epoch."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        if "failure_causes" not in entry.metrics:
            return None
        sightings = {}
        for cause in entry.causes:
            kind, _, evaluator = cause.kind.partition(":")
            what = f"scores of '{evaluator}' failed" if kind == "score" else f"episodes failed ({kind})"
            if cause.count > self.above:
                text = f"{cause.count} {what}: {cause.reason}"
                sightings[": ".join(cause.key)] = Sighting(text, cause.episode)
        return sightings


def _reward_bound(entry: Entry, key: str) -> float | None:
    """Return a bound of the reward's interval, or the reward itself if many rewards are equal."""
    metrics = entry.metrics
    bound: float | None = metrics.get(key)
    if bound is None and (metrics.get("num_scored") or 0) >= _MANY_EQUAL:
        bound = metrics["avg_reward"]
    return bound


def _has_learnt(entry: Entry, earlier: Sequence[Entry]) -> bool:
    """Return whether the mean reward is in the top tenth of the range of rewards so far: the task is learnt.

    A model that always answers correctly says little that is new, and that is no fault. If all rewards have
    been equal from the start, nothing was learnt.
    """
    reward = entry.metrics.get("avg_reward")
    known = [each.metrics for each in (*earlier, entry) if each.metrics.get("max_reward") is not None]
    if reward is None or not known:
        return False
    highest = max(metrics["max_reward"] for metrics in known)
    lowest = min(metrics["min_reward"] for metrics in known)
    return bool(highest > lowest and reward >= highest - 0.1 * (highest - lowest))
