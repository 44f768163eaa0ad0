"""When alarms ring: a pure function of the metrics of a run, so that a resumed run hears the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from etude.alarms.alarm import Alarm, Sighting, Sightings
from etude.config.import_path import where_raised
from etude.core.history import AlarmEvent, Entry
from etude.store.figures import name_of


def events_of(alarms: Mapping[str, Alarm], entry: Entry, earlier: Sequence[Entry]) -> tuple[AlarmEvent, ...]:
    """The alarms that hold for an entry; `earlier` are those of its kind before it, with their own events.

    An alarm rings when it has been wrong for as many entries in a row as it says, and then again only after
    one in which all was well. Entries that do not measure what it is about count neither way.
    """
    return tuple(event for name, alarm in alarms.items() for event in _events(name, alarm, entry, earlier))


def _events(name: str, alarm: Alarm, entry: Entry, earlier: Sequence[Entry]) -> Iterator[AlarmEvent]:
    try:
        now = _sightings(alarm, entry, earlier) or {}
        rows = {of: _row(alarm, of, earlier) for of in now}
    except Exception as error:  # noqa: BLE001  an alarm may be anybody's, and ends no run
        fault = f"whether it is to ring cannot be told, by a fault of its own: {where_raised(error)}"
        now, rows, alarm = {"": Sighting(fault)}, {"": list(earlier[-1:])}, Alarm()
    for of, sighting in now.items():
        row = rows[of]
        known = next((event for each in row[:1] for event in each.alarms if event.key == (name, of)), None)
        if known is None and len(row) + 1 < alarm.epochs:
            continue
        first = row[-1] if row and alarm.epochs > 1 else entry
        since = first.epoch if known is None else known.since
        yield AlarmEvent(
            alarm=name,
            of=of,
            since=since,
            is_new=known is None,
            action=alarm.action,
            text=_sentence(alarm, sighting, entry, [*earlier, entry], since),
            episode=sighting.episode,
        )


def _sightings(alarm: Alarm, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
    seen = alarm.look(entry, earlier)
    if isinstance(seen, str):
        return {"": Sighting(seen)} if seen else {}
    return seen


def _row(alarm: Alarm, of: str, earlier: Sequence[Entry]) -> list[Entry]:
    """The last entries that were wrong in the same way, the latest first, as far as they matter."""
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


def _sentence(alarm: Alarm, sighting: Sighting, entry: Entry, entries: Sequence[Entry], since: int) -> str:
    first = next((each for each in entries if each.epoch == since), entry)
    when = "" if first is entry else f", since {name_of(first)}"
    remedy = alarm.remedy if sighting.remedy is None else sighting.remedy
    return f"{sighting.text}{when}{remedy and f'; {remedy}'}"
