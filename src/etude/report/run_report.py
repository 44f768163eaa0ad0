"""The run report: what a trainer calls after every epoch to have the run's files written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from etude.core.history import History
from etude.report.files import write_metrics_files
from etude.report.plot import write_reward_plot

PLOT = "reward_plot.png"


class RunReport:
    """Writes the metrics files each time it is called, and the plot now and then and at the end."""

    def __init__(
        self, seconds_between_plots: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Drawing takes about a second of CPU; hence not every time."""
        self._between = seconds_between_plots
        self._clock = clock
        self._drawn_at = clock()

    def __call__(self, history: History, folder: Path, final: bool = False) -> None:
        """Write the files of `history` into `folder`. Raises StoreError when one cannot be written."""
        write_metrics_files(history, folder)
        if final or self._clock() - self._drawn_at >= self._between:
            write_reward_plot(history, folder / PLOT)
            self._drawn_at = self._clock()
