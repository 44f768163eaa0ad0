"""Alarm: a look at the metrics of an epoch or a validation, and a sentence where they are wrong.

An alarm is a class of pure functions whose fields are its thresholds. When it rings, and what the run does
then, is decided in one place for all of them: `etude.alarms.ringing` and `etude.loop.alarms`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from etude.config.assemble import alarms_by_default
from etude.config.component import AlarmConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_alarm
from etude.core.around import wrap_implementations
from etude.core.history import Entry

if TYPE_CHECKING:
    from etude.config.builder import Builder


@dataclass(frozen=True, slots=True)
class Sighting:
    """Something that is wrong."""

    text: str
    """In words that a sentence can go on after."""
    episode: str | None = None
    """The id of an episode that shows it."""
    remedy: str | None = None
    """The remedy for this one, in place of the alarm's own."""


Sightings: TypeAlias = Mapping[str, Sighting]
"""By what they are of, such as an evaluator; under "" where there is one thing only."""


class Alarm(AlarmConfig):
    """Base of all alarms. Its fields are the thresholds; a subclass is registered when it is defined.

    `class Refusals(Alarm, name="refusals")` is `_type: refusals`, and without a name
    `_type: my_module:Refusals`. A subclass overrides `look`.
    """

    remedy: ClassVar[str] = ""
    """The end of its sentence: what it usually means, and what to do."""

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Register the class under its name, or under its import path."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        super().__pydantic_init_subclass__(name=path if name is None else name, **kwargs)
        wrap_implementations(cls, Alarm)
        register_alarm(config_type=cls)(_build)

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | str | None:
        """The faults of an epoch or a validation: "" or nothing where all is well.

        `earlier` are those of the same kind before it, oldest first. None where the entry does not measure
        what the alarm is about: it counts neither way then. It must follow from the arguments alone, because
        a resumed run looks again.
        """
        return None


def alarms_of(block: FinetuneConfig) -> dict[str, Alarm]:
    """The alarms of a run that are on, by name: those that its config names, and the others with their
    defaults."""
    alarms = {name: kind() for name, kind in alarms_by_default().items()} | block.alarms
    return {
        name: alarm for name, alarm in alarms.items() if isinstance(alarm, Alarm) and alarm.action != "off"
    }


async def _build(config: Alarm, builder: Builder) -> AsyncIterator[Alarm]:
    """An alarm is its config."""
    yield config
