"""MLflow: a run of an experiment, at a tracking server or in a file or database, found by a tag again."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.trackers.packages import require_package, require_server
from etude.trackers.record import COLUMNS, RunRecord, State, TrackedRun, code_version, flattened

if TYPE_CHECKING:
    from etude.config.builder import Builder

_TOKEN = "etude.token"
_LONGEST, _AT_ONCE = 500, 100
"""Characters of a parameter's value, and rows of a request, that all servers take."""
_STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_UNNAMED = re.compile(r"[^\w\-. :/]")
"""Characters that the name of a metric cannot have."""


class MlflowConfig(TrackerConfig, name="mlflow"):
    """A run of MLflow. Users, passwords and tokens are those of MLflow's own environment variables."""

    tracking_uri: str | None = None
    """The server, as `http://mlflow:5000`, or a folder or database; left out: as MLFLOW_TRACKING_URI says."""
    experiment: str = "etude"
    """Its experiment, which is made where there is none."""

    @field_validator("tracking_uri")
    @classmethod
    def _wherever_it_is_resumed(cls, uri: str | None) -> str | None:
        is_folder = uri is not None and "://" not in uri and uri != "databricks"
        return str(Path(uri).expanduser().absolute()) if uri is not None and is_folder else uri

    def destination(self) -> str:
        at = "" if self.tracking_uri is None else f" at {self.tracking_uri}"
        return f"experiment {self.experiment}{at}"


class MlflowTracker:
    """Logs the records of a run. A database of MLflow's keeps a metric once that is sent twice."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun) -> str:
        """Find the run by its tag, or create it; its parameters are logged once.

        Raises EtudeError where there is no server.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Else it prints the address, also into the JSON of a command.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        client = MlflowClient(tracking_uri=self._config.tracking_uri)
        uri = str(client.tracking_uri)
        if uri.startswith("http"):
            require_server(uri)
        experiment = client.get_experiment_by_name(self._config.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._config.experiment)
        known = client.search_runs([number], f"tags.`{_TOKEN}` = '{run.token}'", max_results=1)
        tags = {_TOKEN: run.token, **{f"code.{k}": v for k, v in code_version(run.environment).items()}}
        shown = known[0] if known else client.create_run(number, tags=tags, run_name=run.name)
        self._id = shown.info.run_id
        client.update_run(self._id, status="RUNNING")
        if not shown.data.params:
            params = [Param(_name(name), text[:_LONGEST]) for name, text in flattened(run.config).items()]
            for batch in _batches(params):
                client.log_batch(self._id, params=batch)
        self._client = client
        return f"{uri}/#/experiments/{number}/runs/{self._id}" if uri.startswith("http") else ""

    def send(self, record: RunRecord) -> None:
        """Log its metrics with its own time, the table as JSON, pictures and weights as artefacts."""
        from mlflow.entities import Metric

        at, step, client = int(record.at * 1000), record.step, self._client
        metrics = [Metric(_name(name), value, at, step) for name, value in sorted(record.metrics.items())]
        place = f"{record.kind}-{step:06d}" + ("" if record.target is None else f"-{record.target}")
        if record.episodes:
            table = {"columns": list(COLUMNS), "data": [list(row.cells()) for row in record.episodes]}
            client.log_dict(self._id, table, f"episodes/{place}.json")
        if record.alarms:
            client.log_text(self._id, "\n".join(record.alarms), f"alarms/{place}.txt")
        for path in record.images.values():
            client.log_artifact(self._id, str(path), "plots")
        for each in record.checkpoints:
            # What is there is never mixed with another version's files: only the tags move.
            name = f"v{each.version}" if each.target is None else f"{each.target}-v{each.version}"
            client.log_artifacts(self._id, str(each.folder), f"checkpoints/{name}")
            for alias in each.aliases:
                tag = f"checkpoint.{alias}" if each.target is None else f"checkpoint.{each.target}.{alias}"
                client.set_tag(self._id, tag, f"checkpoints/{name}")
        for batch in _batches(metrics):
            client.log_batch(self._id, metrics=batch)

    def close(self, state: State) -> None:
        """Say how this process's part of the run has ended."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._id, _STATUS[state])


def _batches(rows: list[Any]) -> Iterator[list[Any]]:
    return (rows[begin : begin + _AT_ONCE] for begin in range(0, len(rows), _AT_ONCE))


def _name(name: str) -> str:
    return _UNNAMED.sub("_", name)


@register_tracker(config_type=MlflowConfig)
async def mlflow(config: MlflowConfig, builder: Builder) -> AsyncIterator[MlflowTracker]:
    """Raises MissingExtraError."""
    require_package("mlflow", "mlflow")
    yield MlflowTracker(config)
