"""MLflow: a run of an experiment, at a tracking server or in a file or database, found by a tag again."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import field_validator

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.trackers.record import RunRecord, State, TrackedRun, require_package, require_server

_STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_UNNAMED = re.compile(r"[^\w\-. :/]")  # What the name of a metric cannot have.


class MlflowConfig(TrackerConfig, name="mlflow"):
    """A run of MLflow. Users, passwords and tokens are those of MLflow's own environment variables."""

    tracking_uri: str | None = None
    """The server, as `http://mlflow:5000`, or a folder or database; left out: as MLFLOW_TRACKING_URI says."""
    experiment: str = "etude"
    """Its experiment, which is made where there is none."""

    @field_validator("tracking_uri")
    @classmethod
    def _wherever_it_is_resumed(cls, uri: str | None) -> str | None:
        is_address = uri is None or "://" in uri or uri == "databricks"
        return uri if is_address else str(Path(str(uri)).expanduser().absolute())

    def destination(self) -> str:
        return f"experiment {self.experiment}" + (f" at {self.tracking_uri}" if self.tracking_uri else "")


class MlflowTracker:
    """Logs the records of a run. A database of MLflow's keeps a metric once that is sent twice."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun) -> str:
        """Find the run by its tag, or create it. Raises EtudeError where there is no server."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # It prints the address, also into the JSON of a command.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        client = MlflowClient(tracking_uri=self._config.tracking_uri)
        if (uri := str(client.tracking_uri)).startswith("http"):
            require_server(uri)
        experiment = client.get_experiment_by_name(self._config.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._config.experiment)
        known = client.search_runs([number], f"tags.`etude.token` = '{run.token}'", max_results=1)
        tags = {"etude.token": run.token, **{f"code.{k}": v for k, v in run.code.items()}}
        shown = known[0] if known else client.create_run(number, tags=tags, run_name=run.name)
        self._id = shown.info.run_id
        client.update_run(self._id, status="RUNNING")
        if not shown.data.params:
            # All servers take values of 500 characters, and 100 parameters at a time.
            rows = [Param(_UNNAMED.sub("_", name), text[:500]) for name, text in run.flat_config.items()]
            for begin in range(0, len(rows), 100):
                client.log_batch(self._id, params=rows[begin : begin + 100])
        self._client = client
        return f"{uri}/#/experiments/{number}/runs/{self._id}" if uri.startswith("http") else ""

    def send(self, record: RunRecord) -> None:
        """Log its metrics with its own time, and the alarms as a text."""
        from mlflow.entities import Metric

        at, step, client = int(record.at * 1000), record.step, self._client
        metrics = [Metric(_UNNAMED.sub("_", name), value, at, step) for name, value in record.metrics.items()]
        place = f"{record.kind}-{step:06d}" + ("" if record.target is None else f"-{record.target}")
        if record.alarms:
            client.log_text(self._id, "\n".join(record.alarms), f"alarms/{place}.txt")
        client.log_batch(self._id, metrics=metrics)

    def close(self, state: State) -> None:
        """Say how this process's part of the run has ended."""
        if self._client is not None:
            self._client.set_terminated(self._id, _STATUS[state])
            self._client = None


@register_tracker(config_type=MlflowConfig)
async def mlflow(config: MlflowConfig, builder: Builder) -> AsyncIterator[MlflowTracker]:
    """Raises MissingExtraError."""
    require_package("mlflow", "mlflow")
    yield MlflowTracker(config)
