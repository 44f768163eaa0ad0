"""The alarms of one model's training, and what the run does when one rings, whoever trains it.

All that is decided is recorded with the epoch or validation in which an alarm rings, in one write: the alarms
that hold, and the version that the model goes back to. So it is decided once, and a run that is killed before
it could do what was decided does it when it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from etude.alarms.alarm import Alarm, events_of
from etude.core.errors import RunPaused
from etude.core.history import AlarmEvent, Entry, EpochEntry, History, ValidationEntry
from etude.store.figures import name_of, version_to_go_back_to
from etude.store.log import EpochLog

E = TypeVar("E", EpochEntry, ValidationEntry)


@dataclass(frozen=True, slots=True)
class Pause:
    """An alarm that pauses the run."""

    alarm: str
    text: str


def pause_for(pauses: Sequence[Pause]) -> None:
    """Raise RunPaused, if there is any."""
    if pauses:
        text = "; ".join(pause.text for pause in pauses)
        raise RunPaused(text, override=f"finetuning.alarms.{pauses[0].alarm}.action=off")


class RunAlarms:
    """Rings the alarms of a model's epochs and validations, and knows what they ask of the run."""

    def __init__(self, alarms: Mapping[str, Alarm], log: EpochLog) -> None:
        self._alarms = alarms
        self._log = log

    def rung(self, entry: E, history: History) -> tuple[E, list[AlarmEvent]]:
        """An entry that is to be recorded, with the alarms that hold and what they lead to; and those of the
        alarms that ring now.

        `history` is that before it. Where it has the entry already, as of an epoch with several jobs, an
        alarm does not ring in it a second time.
        """
        known = history.epochs if isinstance(entry, EpochEntry) else history.validations
        before = [each for each in known if each.epoch < entry.epoch]
        has_rung = {event.key for each in known if each.epoch == entry.epoch for event in each.alarms}
        alarms = events_of(self._alarms, entry, before)
        new = [event for event in alarms if event.is_new and event.key not in has_rung]
        entry = entry.model_copy(update={"alarms": alarms})
        if any(event.action == "rollback" for event in new):
            back_to = version_to_go_back_to(_with(history, entry))
            entry = entry.model_copy(update={"back_to": back_to})
        return entry, new

    def reason_to_stop(self, history: History) -> str | None:
        """Why the run is to end after what it has done; an alarm whose action is another one by now is no
        reason."""
        last = max((entry.epoch for entry in history.epochs), default=0)
        events = self._events([entry for entry in history.entries if entry.epoch == last], "stop")
        return next((f"{name_of(entry)}: {event.text}" for entry, event in events), None)

    async def take_pauses(self, history: History) -> list[Pause]:
        """The alarms that have rung and ask for a pause, each once: the process is to end now."""
        done = self._log.pauses()
        due = {
            name: Pause(event.alarm, f"{name_of(entry)}: {event.text}")
            for entry, event in self._events(history.entries, "pause")
            if event.is_new and (name := _name(entry, event)) not in done
        }
        if due:
            await self._log.add_pauses(due)
        return list(due.values())

    def _events(self, entries: Sequence[Entry], action: str) -> list[tuple[Entry, AlarmEvent]]:
        return [
            (entry, event)
            for entry in entries
            for event in entry.alarms
            if event.action == action and event.alarm in self._alarms
            if self._alarms[event.alarm].action == action
        ]


def facts_of(entry: Entry, event: AlarmEvent, target: str | None) -> dict[str, Any]:
    """An alarm that rings, as JSON, for whoever watches the run."""
    whose = {} if target is None else {"target": target}
    text = f"{name_of(entry)}: {event.text}"
    measured = "validation" if isinstance(entry, ValidationEntry) else "epoch"
    return {
        **whose,
        **event.model_dump(mode="json", exclude={"is_new"}),
        "measured": measured,
        "epoch": entry.epoch,
        "text": text if target is None else f"{target}: {text}",
        "back_to": None if entry.back_to is None else entry.back_to.number,
    }


def _with(history: History, entry: Entry) -> History:
    if isinstance(entry, EpochEntry):
        return history.with_epoch(entry)
    return history.with_validation(entry)


def _name(entry: Entry, event: AlarmEvent) -> str:
    """The name that a pause is remembered by."""
    kind = "validation" if isinstance(entry, ValidationEntry) else "epoch"
    return f"{kind}/{entry.epoch}/{event.alarm}/{event.of}"
