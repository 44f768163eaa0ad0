"""The alarm `failures`: episodes or scores fail for a cause that there was not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm, Sighting, Sightings
from etude.core.history import Entry
from etude.store.summary import cause_key


class Failures(Alarm, name="failures"):
    """Episodes, or scores of an evaluator, have failed; each cause (`failure_causes` of the metrics) by
    itself. The share that may fail before the run ends is `finetuning.error_budget`."""

    by_default: ClassVar[bool] = True

    above: int = Field(default=0, ge=0)
    """Failures of one cause in an epoch that are no matter."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        if "failure_causes" not in entry.metrics:
            return None
        causes = (cause for cause in entry.metrics["failure_causes"] if cause["count"] > self.above)
        return {": ".join(cause_key(cause)): Sighting(_sentence(cause), cause["episode"]) for cause in causes}


def _sentence(cause: Mapping[str, Any]) -> str:
    kind, _, evaluator = cause["kind"].partition(":")
    what = f"scores of '{evaluator}' failed" if kind == "score" else f"episodes failed ({kind})"
    return f"{cause['count']} {what}: {cause['reason']}"
