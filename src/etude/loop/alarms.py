"""Alarms: checks on the metrics of an epoch or validation, and the rules for when they ring.

An alarm is a class of pure functions whose fields are its thresholds. `alarm_events` decides for all alarms
when they ring. It reads only the metrics, so a resumed run decides the same way. `etude.loop.bookkeeper` acts
on alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic import Field

from etude.config.component import AlarmConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import class_path, where_raised
from etude.config.load import alarms_by_default
from etude.config.registry import config_factory, register_alarm
from etude.core.episode import cut_off_share
from etude.core.history import AlarmEvent, Entry, ValidationEntry
from etude.core.interfaces import wrap_implementations
from etude.store.figures import with_rewards

PAGE = "docs/when-it-does-not-learn.md"

_ADVICE: Mapping[str, str] = {
    "no-answer-is-right": (
        "show the model examples in the prompt (tried: 0 of 256 answers right, with three examples 104), or "
        "have it imitate some first: `finetuning.warm_up: {transcripts: agent:demonstrations, steps: 12}` "
        "(then 195)"
    ),
    "a-part-of-the-reward-is-farmed": (
        "`etude episodes` shows what earns it: give 1 for the whole task and 0 for less, and get the first "
        "right answers by examples or `warm_up` (tried: 232 of 256 answers right instead of 102)"
    ),
    "most-groups-are-flat": (
        "play other examples in their place: `trajectory_builders.NAME.replace_flat_groups: 48` (tried: 16 "
        "groups to learn from in epoch 4 instead of 8)"
    ),
    "nothing-is-left-to-learn": (
        "take harder examples, or a stricter reward (tried: 0.99 right before training with a reward for any "
        "number; for the right one 0.41 before and 0.89 after)"
    ),
    "all-attempts-are-alike": (
        "there is no better one to learn from: lower `trainer_adapters.NAME.learning_rate` to a third "
        "(tried: 0.43 right with 3e-3, 0.89 with 1e-3)"
    ),
    "the-reward-falls": (
        "lower `trainer_adapters.NAME.learning_rate` to a third (tried: 0.43 right with 3e-3, 0.89 with 1e-3)"
    ),
    "answers-are-cut-off": (
        "raise `llms.NAME.max_tokens` (tried: 0 of 256 answers right with 2 tokens, 104 with 8), or show the "
        "model short answers in the prompt"
    ),
    "learner-and-engine-differ": (
        "the gradient is of another policy than the one that acts: write `llms.NAME.dtype: float32` (tried: "
        "below 1e-7 then, and 0.72 right instead of 0.60, three seeds)"
    ),
}

REMEDIES: Mapping[str, str] = {name: f"{advice}; see {PAGE}#{name}" for name, advice in _ADVICE.items()}
"""The advice for each symptom, with the section of the page that says more."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A fault that an alarm has found."""

    text: str
    """A clause that more words can follow."""
    episode: str | None = None
    """The id of an episode that shows it."""
    remedy: str | None = None
    """Replaces the alarm's own remedy."""


Sightings: TypeAlias = Mapping[str, Sighting]
"""Sightings by the thing at fault, such as an evaluator. The key is "" if an alarm watches only one thing."""


class Alarm(AlarmConfig):
    """Base of all alarms. Its fields are the thresholds; a subclass is registered when it is defined.

    `class Refusals(Alarm, name="refusals")` is `_type: refusals`. Without a name it is `_type:
    my_module:Refusals`. A subclass overrides `look`.
    """

    remedy: ClassVar[str] = ""
    """The end of the alarm's sentence: the usual cause and the remedy."""

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Register the class under its name, or under its import path."""
        super().__pydantic_init_subclass__(name=class_path(cls) if name is None else name, **kwargs)
        wrap_implementations(cls, Alarm)
        register_alarm(config_type=cls)(config_factory(lambda config: config))

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | str | None:
        """Return the faults of an epoch or validation: "", an empty mapping or None if there are none, or if
        the entry lacks the metrics that the alarm needs.

        `earlier` has the entries of the same kind before it, oldest first. The answer must depend only on the
        arguments: a resumed run asks again.
        """
        return None


def active_alarms(block: FinetuneConfig) -> dict[str, Alarm]:
    """Return the run's active alarms by name: those in its config, and the others with their defaults."""
    alarms = {name: kind() for name, kind in alarms_by_default().items()} | block.alarms
    return {
        name: alarm for name, alarm in alarms.items() if isinstance(alarm, Alarm) and alarm.action != "off"
    }


def alarm_events(
    alarms: Mapping[str, Alarm], entry: Entry, earlier: Sequence[Entry]
) -> tuple[AlarmEvent, ...]:
    """Return the alarms that hold for an entry. `earlier` has the entries of its kind before it, with events.
    An alarm rings, unless it has held for the entry before."""
    known = {event.key for event in earlier[-1].alarms} if earlier else set()
    return tuple(
        AlarmEvent(
            alarm=name,
            of=of,
            is_new=(name, of) not in known,
            action=alarm.action,
            text="; ".join(filter(None, (sighting.text, sighting.remedy or alarm.remedy))),
            episode=sighting.episode,
        )
        for name, alarm, of, sighting in _sightings(alarms, entry, earlier)
    )


def _sightings(
    alarms: Mapping[str, Alarm], entry: Entry, earlier: Sequence[Entry]
) -> Iterator[tuple[str, Alarm, str, Sighting]]:
    for name, alarm in alarms.items():
        try:
            seen = alarm.look(entry, earlier) or {}
            found = {"": Sighting(seen)} if isinstance(seen, str) else dict(seen)
        except Exception as error:  # noqa: BLE001  an alarm may be anybody's, and ends no run
            fault = f"the alarm could not be checked, because its own code failed: {where_raised(error)}"
            found, alarm = {"": Sighting(fault)}, Alarm()
        yield from ((name, alarm, of, sighting) for of, sighting in found.items())


_FEW = 0.05
"""If fewer answers than this share get the full reward, the advice is to show examples."""


class Mismatch(Alarm, name="mismatch"):
    """The learner and the engine give sampled tokens different probabilities (`training.mismatch_kl`)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["learner-and-engine-differ"]

    above: float = Field(default=0.05, gt=0)
    """The largest allowed difference, in nats per token. Rounding causes small differences, and with
    `collect_ahead` so does the update in between."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str:
        divergence = (entry.metrics.get("training") or {}).get("mismatch_kl")
        if divergence is None or divergence <= self.above:
            return ""
        return f"learner and engine differ by {divergence:.3g} nats a token (mismatch_kl)"


class CutOffAnswers(Alarm, name="cut_off_answers"):
    """Many answers are cut off at the token limit (`cut_off_share` of the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["answers-are-cut-off"]

    above: float = Field(default=0.2, ge=0, lt=1)
    """The share of all answers that may be cut off."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str:
        return self.seen_in(entry.metrics.get("calls") or {})

    def seen_in(self, calls: Mapping[str, int]) -> str:
        """Return a sentence if too many of the counted answers were cut off, else an empty string."""
        share = cut_off_share(calls)
        if share is None or share <= self.above:
            return ""
        counts = f"{calls['cut_off']} of {calls['answers']} answers ({100 * share:.0f} %)"
        return f"{counts} were cut off at the token limit"


class EntropyCollapse(Alarm, name="entropy_collapse"):
    """The entropy of sampled tokens (`sampled_entropy` of the metrics) is far below its value in the first
    epoch, twice in a row. The reward is not yet in the top tenth of its range so far."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["all-attempts-are-alike"]

    below: float = Field(default=0.05, gt=0, lt=1)
    """The alarm rings if the entropy is below this share of the first epoch's entropy."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str:
        entropy = entry.metrics.get("sampled_entropy")
        values = (each.metrics.get("sampled_entropy") for each in earlier)
        known = [value for value in values if value is not None]
        if entropy is None or not known:
            return ""
        first, last = known[0], known[-1]
        if max(entropy, last) >= self.below * first or _has_learnt(entry, earlier):
            return ""
        return f"the entropy of sampled tokens has collapsed to {entropy:.3g} nats a token from {first:.3g}"


class RewardCollapse(Alarm, name="reward_collapse"):
    """The reward has fallen below the first one, and their intervals do not overlap."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["the-reward-falls"]

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str:
        before = next(iter(with_rewards(earlier)), None)
        if before is None or entry.metrics.get("avg_reward") is None:
            return ""
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

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str:
        first = next(iter(with_rewards(earlier)), None)
        now = entry.distribution
        before = None if first is None else first.distribution
        if now is None or first is None or before is None:
            return ""
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

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings:
        groups = entry.metrics.get("reward_groups") or {"compared": 0, "flat": 0}
        compared, flat = groups["compared"], groups["flat"]
        if not compared or flat < self.at_least * compared or _has_learnt(entry, earlier):
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


class Failures(Alarm, name="failures"):
    """Episodes, or scores of an evaluator, have failed. Each cause (`failure_causes` of the metrics) is
    checked separately. `finetuning.error_budget` sets the share of failures that ends the run."""

    by_default: ClassVar[bool] = True

    above: int = Field(default=0, ge=0)
    """How many failures of one cause are allowed in an epoch."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings:
        sightings = {}
        for cause in entry.causes:
            kind, _, evaluator = cause.kind.partition(":")
            what = f"scores of '{evaluator}' failed" if kind == "score" else f"episodes failed ({kind})"
            if cause.count > self.above:
                text = f"{cause.count} {what}: {cause.reason}"
                sightings[": ".join(cause.key)] = Sighting(text, cause.episode)
        return sightings


def _reward_bound(entry: Entry, key: str) -> float | None:
    """Return a bound of the reward's interval, or the reward itself if five or more rewards are all equal."""
    metrics = entry.metrics
    bound: float | None = metrics.get(key)
    if bound is None and (metrics.get("num_scored") or 0) >= 5:
        bound = metrics["avg_reward"]
    return bound


def _has_learnt(entry: Entry, earlier: Sequence[Entry]) -> bool:
    """Return whether the mean reward is in the top tenth of the range of rewards so far: the task is learnt.
    A model that always answers correctly says little that is new, which is not a fault."""
    reward = entry.metrics.get("avg_reward")
    known = [each.metrics for each in (*earlier, entry) if each.metrics.get("max_reward") is not None]
    if reward is None or not known:
        return False
    highest = max(metrics["max_reward"] for metrics in known)
    lowest = min(metrics["min_reward"] for metrics in known)
    return bool(highest > lowest and reward >= highest - 0.1 * (highest - lowest))
