"""The outcome of a run of training."""

from __future__ import annotations

from collections.abc import Sequence

from etude.alarms.remedies import PAGE
from etude.core.errors import TrainingError
from etude.core.history import EpochEntry, History
from etude.core.job import TrainingJobStatus
from etude.store.summary import causes_in, shown_cause


def require_trained(histories: Sequence[History]) -> list[TrainingJobStatus]:
    """The statuses of all jobs, by epoch. Raises TrainingError when there were none."""
    epochs: list[EpochEntry] = [entry for history in histories for entry in history.epochs]
    statuses = [entry.status for entry in sorted(epochs, key=lambda entry: entry.epoch) if entry.status]
    if not statuses:
        reasons = sorted({entry.skipped for entry in epochs if entry.skipped is not None})
        most = max((len(history.epochs) for history in histories), default=0)
        shown = (f"\n  {shown_cause(cause)} (first in {cause['episode']})" for cause in causes_in(epochs))
        causes = "".join(shown)
        raise TrainingError(
            f"the run trained on nothing in {most} epochs. {' | '.join(reasons)}; see {PAGE}{causes}"
        )
    return statuses
