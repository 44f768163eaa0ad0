"""Trackio: a run of a project in its local store, or in a Space of the Hugging Face hub."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from typing import Any

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.core.errors import EtudeError
from etude.trackers.record import RunRecord, State, TrackedRun, require_package

_KEY = "record"
"""A value of each log, which names its record."""
_SECONDS_TO_STORE = 60.0
"""Trackio stores logs from a thread of its own, about half a second later."""


class TrackioConfig(TrackerConfig, name="trackio"):
    """A run of Trackio; `trackio show` opens its dashboard."""

    project: str = "etude"
    """Its project."""
    space_id: str | None = None
    """A Space of the hub, as `user/name`; left out: the local store, where TRACKIO_DIR says."""

    def destination(self) -> str:
        return f"project {self.project}" + ("" if self.space_id is None else f" in {self.space_id}")


class TrackioTracker:
    """Logs the records of a run."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        """Begin the run, or go on with it by its name."""
        import trackio

        self.close("stopped")
        with redirect_stdout(sys.stderr):  # It prints where it keeps things, also into a command's JSON.
            self._run = trackio.init(
                project=self._config.project,
                name=run.unique_name,
                space_id=self._config.space_id,
                config={**run.flat_config, **run.code},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return f"trackio show --project {self._config.project}"

    def send(self, record: RunRecord) -> None:
        """Log it, and wait until it is in the local store."""
        import trackio

        self._run.log({**record.logged(trackio), _KEY: record.key}, step=record.step)
        until = time.monotonic() + _SECONDS_TO_STORE
        while self._config.space_id is None and record.key not in self._stored():
            if time.monotonic() > until:
                raise EtudeError(f"Trackio has not stored what it was given in {_SECONDS_TO_STORE:g} s")
            time.sleep(0.05)

    def close(self, state: State) -> None:
        """Finish the run as far as this process goes."""
        if self._run is not None:
            run, self._run = self._run, None
            with redirect_stdout(sys.stderr):
                run.finish()

    def _stored(self) -> set[str]:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(self._config.project, self._run.name)
        return {str(log.get(_KEY)) for log in logs}


@register_tracker(config_type=TrackioConfig)
async def trackio(config: TrackioConfig, builder: Builder) -> AsyncIterator[TrackioTracker]:
    """Raises MissingExtraError."""
    require_package("trackio", "trackio")
    yield TrackioTracker(config)
