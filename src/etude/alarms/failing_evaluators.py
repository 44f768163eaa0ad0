"""The alarm `failing_evaluators`: an evaluator often gives no score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm, Sighting, Sightings
from etude.core.history import Entry


class FailingEvaluators(Alarm, name="failing_evaluators"):
    """An evaluator has given no score for a part of the episodes; each evaluator by itself."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "episodes without a score are left out, and if those are the hard ones the reward looks better than "
        "it is: mend the evaluator, or give it a longer timeout"
    )

    above: float = Field(default=0.05, ge=0, lt=1)
    """The share of an evaluator's scores that may fail."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        scores = entry.metrics.get("evaluators") or {}
        failures = entry.metrics.get("failures") or {}
        if not scores:
            return None
        sightings = {}
        for name, score in scores.items():
            failed = failures.get(f"score:{name}", 0)
            asked = failed + score["n"]
            if failed > self.above * asked:
                share = f"{failed} of {asked} times ({100 * failed / asked:.0f} %)"
                sightings[name] = Sighting(f"the evaluator '{name}' gave no score {share}")
        return sightings
