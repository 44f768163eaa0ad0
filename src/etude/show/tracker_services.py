"""The trackers for MLflow, TensorBoard and Weights & Biases, and a user's own."""

import asyncio
import inspect
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.import_path import import_object
from etude.config.registry import config_factory, register_tracker
from etude.core.errors import EtudeError, RequestError, first_line
from etude.loop.arguments import Live
from etude.show.tracker import PATIENCE, RunRecord, State, TrackedRun, Tracker, register_package_tracker
from etude.store.files import private_folder

_STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_UNNAMED = re.compile(r"[^\w\-. :/]")  # Characters that the name of a metric cannot have.
_SECONDS_TO_ANSWER = 10.0


def _require_server(url: str) -> None:
    """Raise EtudeError if no server answers at an HTTP address: packages would try for minutes."""
    try:
        # Without the password of the address, because nobody has shown whose server it is.
        httpx.head(httpx.URL(url).copy_with(userinfo=b""), timeout=_SECONDS_TO_ANSWER, verify=False)
    except httpx.TransportError as error:
        raise EtudeError(f"no server answers at {url}: {first_line(error)}") from error


class _ServiceTracker:
    """A tracker that holds an open object of a package."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._held: Any = None

    def close(self, state: State) -> None:
        """End this process's part of the run, once everything is sent or on disk."""
        if self._held is not None:
            held, self._held = self._held, None
            self._end(held, state)

    def _end(self, held: Any, state: State) -> None:
        held.close()


class MlflowConfig(TrackerConfig, name="mlflow"):
    """A run of MLflow. The server, users, passwords and tokens come from MLflow's own environment variables.

    MLFLOW_TRACKING_URI names the server, such as `http://mlflow:5000`, a folder or a database.
    """

    experiment: str = "etude"
    """The experiment. It is created if it does not exist."""

    def destination(self) -> str:
        return f"experiment {self.experiment}"


class MlflowTracker(_ServiceTracker):
    """The tracker for MLflow. If a metric is sent twice, MLflow's database keeps it once."""

    _config: MlflowConfig
    _id = ""

    def open(self, run: TrackedRun) -> str:
        """Find the run by its tag, or create it. Raises EtudeError if there is no server."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Otherwise MLflow prints the address, also into the JSON of a command.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        client = MlflowClient()
        if (uri := str(client.tracking_uri)).startswith("http"):
            _require_server(uri)
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
        self._held = client
        return f"{uri}/#/experiments/{number}/runs/{self._id}" if uri.startswith("http") else ""

    def send(self, record: RunRecord) -> None:
        """Log the metrics with the record's own time, and the alarms as text."""
        from mlflow.entities import Metric

        at, step, client = int(record.at * 1000), record.step, self._held
        metrics = [Metric(_UNNAMED.sub("_", name), value, at, step) for name, value in record.metrics.items()]
        place = f"{record.kind}-{step:06d}" + ("" if record.target is None else f"-{record.target}")
        if record.alarms:
            client.log_text(self._id, "\n".join(record.alarms), f"alarms/{place}.txt")
        client.log_batch(self._id, metrics=metrics)

    def _end(self, held: Any, state: State) -> None:
        held.set_terminated(self._id, _STATUS[state])


class TensorBoardConfig(TrackerConfig, name="tensorboard"):
    """Event files for TensorBoard in the run's folder. `tensorboard --logdir runs` shows all runs."""


class TensorBoardTracker(_ServiceTracker):
    """The tracker for TensorBoard, which writes records as events."""

    def open(self, run: TrackedRun) -> str:
        """Begin a file, with the config."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.close("stopped")
        place = private_folder(run.folder / "tensorboard")
        self._held = EventFileWriter(str(place))
        rows = (f"- {key}: `{text}`" for key, text in (run.code | run.flat_config).items())
        self._write(0, time.time(), [], {"config": "\n".join(rows)})
        return f"tensorboard --logdir {place}"

    def send(self, record: RunRecord) -> None:
        """Add an event with the metrics and the alarms."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = sorted(record.metrics.items())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._write(record.step, record.at, values, {"alarms": "\n\n".join(record.alarms)})

    def _write(self, step: int, at: float, values: list[Any], texts: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        shown = [value for name, text in texts.items() if text for value in text_pb(name, text).value]
        self._held.add_event(Event(wall_time=at, step=step, summary=Summary(value=[*values, *shown])))
        self._held.flush()


class WandbConfig(TrackerConfig, name="wandb"):
    """A run of Weights & Biases, in the account of `wandb login` or WANDB_API_KEY.

    WANDB_MODE=offline keeps it in the run folder, for `wandb sync`.
    """

    project: str = "etude"
    """The project. It is created if it does not exist. Its owner is your account, or WANDB_ENTITY."""

    def destination(self) -> str:
        return f"project {self.project}"


class WandbTracker(_ServiceTracker):
    """The tracker for Weights & Biases."""

    _config: WandbConfig

    def open(self, run: TrackedRun) -> str:
        """Begin the run, or continue it. Raises EtudeError if there is no server."""
        import wandb

        self.close("stopped")
        settings = wandb.setup().settings
        if settings.mode == "online":
            # W&B itself would try for a minute, during which no program can end.
            _require_server(settings.base_url)
        self._held = wandb.init(
            project=self._config.project,
            id=run.token,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config={**run.config, "code": run.code},
            allow_val_change=True,
            # Do not touch the user's own W&B run in the same process.
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=PATIENCE, finish_timeout=PATIENCE
            ),
        )
        self._held.define_metric("epoch")
        self._held.define_metric("*", step_metric="epoch")
        if self._held.offline:
            return f"wandb sync {run.folder / 'wandb' / f'offline-run-*-{run.token}'}"
        return str(self._held.url or "")

    def send(self, record: RunRecord) -> None:
        """Log its metrics and alarms as one step."""
        alarms = {"alarms": "\n".join(record.alarms)} if record.alarms else {}
        self._held.log({**record.metrics, **alarms, "epoch": record.step}, step=record.number, commit=True)

    def _end(self, held: Any, state: State) -> None:
        held.finish(exit_code=int(state != "finished"))


class FunctionTrackerConfig(TrackerConfig, name="function"):
    """Your function that is called with each record of the run, or your own `etude.Tracker`."""

    function: str
    """The import path, as `module:name`."""

    def destination(self) -> str:
        return self.function


class LiveTrackerConfig(Live, TrackerConfig, name="live"):
    """A function that a program gave as a Python object."""

    def destination(self) -> str:
        return self.name


class FunctionTracker(Tracker):
    """A tracker that calls a function, plain or async, with each record."""

    def __init__(self, function: Callable[[RunRecord], Any]) -> None:
        self._function = function

    def open(self, run: TrackedRun) -> str:
        return ""

    def send(self, record: RunRecord) -> None:
        result = self._function(record)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def close(self, state: State) -> None:
        pass


def as_tracker(value: Any) -> Tracker:
    """Return a tracker for a function, a tracker, or a class of trackers. Raises RequestError."""
    if isinstance(value, type):
        value = value()
    if all(callable(getattr(value, name, None)) for name in ("open", "send", "close")):
        tracker: Tracker = value
        return tracker
    if not callable(value):
        raise RequestError(f"a tracker must be a function or have open, send and close: {value!r:.80}")
    return FunctionTracker(value)


register_tracker(config_type=FunctionTrackerConfig)(
    config_factory(lambda config: as_tracker(import_object(config.function)))
)


@register_tracker(config_type=LiveTrackerConfig)
async def live_tracker(config: LiveTrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """Yield the function. If its program is not running, the first record raises RequestError."""

    def missing(record: RunRecord) -> None:
        run = "run" if builder.run is None else str(builder.run.path)
        raise RequestError(
            f"the run was started by a program with its own function '{config.name}', which is not in the "
            f"config; pass it again in Python: etude.resume({run!r}, report=…)"
        )

    yield as_tracker(missing if config.value is None else config.value)


register_package_tracker(MlflowConfig, MlflowTracker, "mlflow")
register_package_tracker(TensorBoardConfig, TensorBoardTracker, "tensorboard")
register_package_tracker(WandbConfig, WandbTracker, "wandb")
