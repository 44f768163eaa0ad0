"""The record of one model's training: its history and alarms, which are journalled, acted on and reported.

The alarms that hold are stored with the epoch or validation, in one write. So each is decided once. If the
run is killed before it acts on one, it does so when it is resumed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etude.config.finetuning import FinetuneConfig
from etude.core.errors import JobStillRunning, TrainingError
from etude.core.history import AlarmEvent, Entry, EpochEntry, History, ValidationEntry
from etude.core.interfaces import Progress
from etude.core.job import TrainingJobStatus
from etude.core.json_text import json_facts
from etude.core.records import MetricsAdded, Record, RunEnded
from etude.loop.alarms import PAGE, active_alarms, alarm_events
from etude.runtime import Runtime
from etude.store.figures import causes_in, show_command, summary_in
from etude.store.files import private_folder
from etude.store.log import ModelLog
from etude.store.run_folder import RunFolder

E = TypeVar("E", EpochEntry, ValidationEntry)


def require_trained(histories: Sequence[History]) -> list[TrainingJobStatus]:
    """Return the statuses of all jobs, by epoch. Raises TrainingError if there were none."""
    epochs: list[EpochEntry] = [entry for history in histories for entry in history.epochs]
    statuses = [entry.status for entry in sorted(epochs, key=lambda entry: entry.epoch) if entry.status]
    if not statuses:
        reasons = sorted({entry.skipped for entry in epochs if entry.skipped is not None})
        most = max((len(history.epochs) for history in histories), default=0)
        causes = "".join(f"\n  {cause} (first in {cause.episode})" for cause in causes_in(epochs))
        raise TrainingError(
            f"the run trained on nothing in {most} epochs. {' | '.join(reasons)}; see {PAGE}{causes}"
        )
    return statuses


async def end_run(
    records: Sequence[TrainingRecord], num_epochs: int, run: RunFolder, progress: Progress
) -> None:
    """Record that a run is over, and report its end. `records` has one of each target."""
    for record in records:
        record.report(final=True)
    for record in records:
        if record.log.state.end is None:
            await record.log.add(RunEnded())
    by_target = {record.target: record.history for record in records}
    progress.finished(summary_in(by_target, run.name, num_epochs).as_json())


@asynccontextmanager
async def record_failure(log: ModelLog, failure: Record) -> AsyncIterator[None]:
    """Record that a job fails in the block. Otherwise a resumed run would find it again, and fail again.

    A job that may still be running is not dropped: there must never be two of them.
    """
    try:
        yield
    except JobStillRunning:
        raise
    except TrainingError:
        await log.add(failure)
        raise


class TrainingRecord:
    """Records a trainer's work. In a run with several targets, each target has its own."""

    def __init__(self, runtime: Runtime, config: FinetuneConfig) -> None:
        """`config` is the `finetuning` block of the target, with the alarms."""
        self.target = runtime.target
        self.log = ModelLog(runtime.run.journal, self.target)
        self.alarms = active_alarms(config)
        self._runtime = runtime
        self._logged: dict[int, dict[str, Any]] = {}
        """Metrics that arrived for epochs that are not recorded yet."""
        self._ringing: list[tuple[Entry, AlarmEvent]] = []
        """Alarms that are recorded, but not reported yet."""

    @property
    def history(self) -> History:
        """The epochs and validations so far."""
        return self.log.state.history

    def is_done(self, epoch: int) -> bool:
        """Return whether the epoch (from 0) is recorded."""
        return self.history.epoch(epoch + 1) is not None

    def add_metrics(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Take metrics of an epoch (from 0), replacing others with their names."""
        metrics = json_facts(metrics)
        entry = self.history.epoch(epoch + 1)
        if entry is None:
            self._logged[epoch] = {**self._logged.get(epoch, {}), **metrics}
        elif any(entry.metrics.get(key) != value for key, value in metrics.items()):
            self.log.add_soon(MetricsAdded(epoch=entry.epoch, metrics=metrics))

    async def add(self, entry: E) -> E:
        """Record an epoch or a validation with the alarms that hold, and their effects.

        This replaces an earlier record, as for an epoch with several jobs. Then an alarm does not ring again.
        """
        metrics = json_facts(entry.metrics)
        if entry.kind == "epoch":
            metrics |= self._logged.get(entry.epoch - 1, {})
        entry = entry.model_copy(update={"metrics": metrics})
        known: Sequence[Entry] = self.history.epochs if entry.kind == "epoch" else self.history.validations
        before = [each for each in known if each.epoch < entry.epoch]
        has_rung = {event.key for each in known if each.epoch == entry.epoch for event in each.alarms}
        alarms = alarm_events(self.alarms, entry, before)
        new = [event for event in alarms if event.is_new and event.key not in has_rung]
        entry = entry.model_copy(update={"alarms": alarms})
        await self.log.add(entry)
        if entry.kind == "epoch":
            # Some may have arrived meanwhile.
            self.add_metrics(entry.epoch - 1, self._logged.pop(entry.epoch - 1, {}))
        self._ringing += [(entry, event) for event in new]
        return entry

    def reason_to_stop(self) -> str | None:
        """Return why an alarm ends the run after its last epoch, unless the alarm's action has changed."""
        last = max((entry.epoch for entry in self.history.epochs), default=0)
        for entry in self.history.entries:
            for event in entry.alarms if entry.epoch == last else ():
                alarm = self.alarms.get(event.alarm)
                if event.action == "stop" and alarm is not None and alarm.action == "stop":
                    return self.by_name(f"{entry}: {event.text}")
        return None

    def report(self, *, output_dir: str | None = None, final: bool = False) -> None:
        """Report alarms that rang since the last report, and write the metrics files.

        At the end of a run, warn if held-out examples were not used, or one of several targets not trained.
        """
        runtime, say = self._runtime, partial(self._runtime.progress.message, warning=True)
        ringing, self._ringing = self._ringing, []
        for entry, event in ringing:
            facts = event.model_dump(mode="json", exclude={"is_new"})
            facts["text"] = self.by_name(f"{entry}: {event.text}")
            if event.episode is not None:
                facts["text"] += f". One of them: {show_command(runtime.run.path, event.episode)}"
            facts |= {"measured": entry.kind, "epoch": entry.epoch}
            runtime.progress.alarm(self.with_name(facts))
        if final and runtime.validation_examples and not self.history.validations:
            say(
                f"the trainer never ran the validation: {len(runtime.validation_examples)} held-out examples "
                "were not used. Await `run_validation_evaluation(epoch, run_id)` in its `run`"
            )
        is_to_train = final and self.target is not None and not runtime.target_config.frozen
        if is_to_train and not self.history.trained:
            say("was never trained in this run")
        if runtime.report is not None:
            runtime.report(self.history, self.folder(output_dir), final)

    def folder(self, output_dir: str | None = None) -> Path:
        """Return the folder of the files: the run folder or `output_dir`, or a target's own part of it."""
        folder = self._runtime.run.path if output_dir is None else Path(output_dir)
        if self.target is not None:
            folder = folder / "targets" / self.target
            private_folder(folder)
        return folder

    def with_name(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics with the target's name under `target`, if there are several targets."""
        return metrics if self.target is None else {"target": self.target, **metrics}

    def by_name(self, text: str) -> str:
        """Return the text with the target's name before it, if there are several targets."""
        return text if self.target is None else f"{self.target}: {text}"
