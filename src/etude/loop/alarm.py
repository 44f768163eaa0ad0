"""The base of alarms: checks on the metrics of an epoch or validation, and the rules for when they ring.

An alarm is a class of pure functions whose fields are its thresholds. This module decides for all alarms when
they ring. It reads only the metrics, so a resumed run decides the same way. `etude.loop.record` acts on
alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from etude.config.assemble import alarms_by_default
from etude.config.component import AlarmConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import where_raised
from etude.config.registry import config_factory, register_alarm
from etude.core.history import AlarmEvent, Entry
from etude.core.return_checks import wrap_implementations

PAGE = "docs/when-it-does-not-learn.md"

_ADVICE: Mapping[str, str] = {
    "no-answer-is-right": (
        "show the model examples in the prompt (tried: 0 of 256 answers right, with three examples 104), or "
        "have it imitate some first: `finetuning.warm_up: {transcripts: agent:demonstrations, steps: 12}` "
        "(then 195)"
    ),
    "a-part-of-the-reward-is-farmed": (
        "`etude episodes` shows what earns it: give 1 for the whole task and 0 for less, and get the first "
        "right answers by examples or `warm_up` (tried: 232 of 256 answers right in place of 102)"
    ),
    "most-groups-are-flat": (
        "play other examples in their place: `trajectory_builders.NAME.replace_flat_groups: 48` (tried: 16 "
        "groups to learn from in epoch 4 in place of 8)"
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
        "below 1e-7 then, and 0.72 right in place of 0.60, three seeds)"
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
        path = f"{cls.__module__}:{cls.__qualname__}"
        super().__pydantic_init_subclass__(name=path if name is None else name, **kwargs)
        wrap_implementations(cls, Alarm)
        register_alarm(config_type=cls)(config_factory(lambda config: config))

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | str | None:
        """Return the faults of an epoch or validation: "" or an empty mapping if there are none.

        `earlier` has the entries of the same kind before it, oldest first. Return None if the entry lacks the
        metrics that the alarm needs; such an entry is passed over. The result must depend only on the
        arguments, because a resumed run calls this again.
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

    An alarm rings after `alarm.epochs` wrong entries in a row. It rings again only after an entry without the
    fault. Entries that lack its metrics are passed over.
    """
    return tuple(event for name, alarm in alarms.items() for event in _events(name, alarm, entry, earlier))


def _events(name: str, alarm: Alarm, entry: Entry, earlier: Sequence[Entry]) -> Iterator[AlarmEvent]:
    try:
        now = _sightings(alarm, entry, earlier) or {}
        rows = {of: _entries_in_a_row(alarm, of, earlier) for of in now}
    except Exception as error:  # noqa: BLE001  an alarm may be anybody's, and ends no run
        fault = f"the alarm could not be checked, because its own code failed: {where_raised(error)}"
        now, rows, alarm = {"": Sighting(fault)}, {"": list(earlier[-1:])}, Alarm()
    for of, sighting in now.items():
        row = rows[of]
        known = next((event for each in row[:1] for event in each.alarms if event.key == (name, of)), None)
        if known is None and len(row) + 1 < alarm.epochs:
            continue
        first = row[-1] if row and alarm.epochs > 1 else entry
        since = first.epoch if known is None else known.since
        begun = next((each for each in earlier if each.epoch == since), entry)
        when = "" if begun is entry else f", since {begun}"
        remedy = alarm.remedy if sighting.remedy is None else sighting.remedy
        yield AlarmEvent(
            alarm=name,
            of=of,
            since=since,
            is_new=known is None,
            action=alarm.action,
            text=f"{sighting.text}{when}{remedy and f'; {remedy}'}",
            episode=sighting.episode,
        )


def _sightings(alarm: Alarm, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
    seen = alarm.look(entry, earlier)
    if isinstance(seen, str):
        return {"": Sighting(seen)} if seen else {}
    return seen


def _entries_in_a_row(alarm: Alarm, of: str, earlier: Sequence[Entry]) -> list[Entry]:
    """Return the latest entries in a row that had the same fault, newest first, as many as the rules need."""
    row: list[Entry] = []
    for index in range(len(earlier) - 1, -1, -1):
        if len(row) == max(1, alarm.epochs - 1):
            break
        seen = _sightings(alarm, earlier[index], earlier[:index])
        if seen is not None and of not in seen:
            break
        if seen is not None:
            row.append(earlier[index])
    return row
