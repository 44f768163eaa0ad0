"""The alarm `template_drift`: conversations are not continued in the tokens that they had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.core.history import Entry


class TemplateDrift(Alarm, name="template_drift"):
    """Many training sequences begin in the middle of a conversation, because its template wrote what was said
    before in other tokens (`drifted` of `branches` in the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "each of them reads the conversation anew, which costs time and tells the model other tokens than it "
        "said: `etude check` shows which messages the template writes differently"
    )

    above: float = Field(default=0.1, ge=0, lt=1)
    """The share of all training sequences that may be."""

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
