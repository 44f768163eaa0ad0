"""A job of the database, from its file to a new model."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from torch import Tensor

from etude.algorithms.algorithm import Algorithm
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.core.keys import fold
from etude.core.training_rows import ROW_OF
from etude.jobs.training import JobData, JobListener, JobTraining, units_of_rows
from etude.jobs.training import Row as UnitRow
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.plan import Schedule, Step
from etude.learner.team import Team
from etude.models.policy import LoraOptions, Policy
from etude.server.database import Row
from etude.server.files import read_rows
from etude.server.hyperparameters import job_algorithm
from etude.server.jobs import JobFolder, model_name
from etude.server.models import ModelStore, load_policy
from etude.server.settings import ServerSettings
from etude.server.stores import Stores
from etude.store.files import draft_of

KEPT_CHECKPOINTS = 3
"""Checkpoints of a job that can be asked as models: those of its last epochs."""

_COLUMNS = ("loss", "learning_rate", "tokens_per_s", "valid_loss")
_HEADER = "step,train_loss,learning_rate,tokens_per_s,valid_loss"


def train_job(
    settings: ServerSettings, job: Row, stores: Stores, team: Team, canceled: Event, stopping: Event
) -> None:
    """Train a job, from its newest checkpoint, and make its model. All processes of the team call it.

    Raises TrainingError for rows that the model cannot take, ApiError for a model or file that is gone,
    TrainingCanceled when `canceled` is set, and Interrupted, after a checkpoint, when `stopping` is.
    """
    values: Mapping[str, Any] = job["hyperparameters"]
    algorithm = job_algorithm(job["method"], values)
    policy = _load_policy(settings, job, stores.models, keep_base="reference" in algorithm.needs())
    before = policy.digest()
    options = LearnerOptions(
        learning_rate=values["learning_rate"] * values["learning_rate_multiplier"],
        schedule=Schedule(values["lr_schedule"], values["warmup_steps"]),
        gradient_checkpointing=values["gradient_checkpointing"],
    )
    reporter = _Reporter(job, stores, settings.data_dir)
    checkpoints = JobFolder(settings.data_dir, job["id"]).checkpoints
    data = _data_of_rows(job, stores, algorithm, policy)
    learner = Learner(policy, options, team)
    training = JobTraining(learner, data, reporter, checkpoints, settings.checkpoint_steps)
    training.run(canceled, stopping)
    weights = team.whole(policy.trainable())
    if team.leads:
        reporter.finish(policy, weights, before, training.history, data.trained(training))


def _data_of_rows(job: Row, stores: Stores, algorithm: Algorithm, policy: Policy) -> JobData:
    def rows_of(file: str | None) -> Sequence[UnitRow]:
        if not file:
            return []
        rows: Any = read_rows(stores.files.path(file), ROW_OF[algorithm.kind])
        return units_of_rows(rows, policy, algorithm)

    return JobData(
        algorithm,
        rows_of(job["training_file"]),
        rows_of(job["validation_file"]),
        passes=job["hyperparameters"]["n_epochs"],
        batch_size=job["hyperparameters"]["batch_size"],
        seed=job["seed"],
        key=("epoch",),
    )


def _load_policy(settings: ServerSettings, job: Row, models: ModelStore, *, keep_base: bool) -> Policy:
    model, values = models.get(job["model"]), job["hyperparameters"]
    fresh = values["lora_rank"] > 0 and model.lora is None
    lora = LoraOptions(values["lora_rank"], values["lora_alpha"]) if fresh else None
    from_base = keep_base and values.get("reference") == "base"
    policy = load_policy(settings, model, lora=lora, seed=fold(job["seed"], "lora"), keep_base=from_base)
    if keep_base:
        # Where the server's own model is not the reference: the one that the job starts from.
        policy.keep_base()
    return policy


class _Reporter(JobListener):
    """Writes what a job does into the database: events, checkpoints that are models, and its end."""

    def __init__(self, job: Row, stores: Stores, data_dir: Path) -> None:
        self._job = job
        self._id = str(job["id"])
        self._jobs = stores.jobs
        self._files = stores.files
        self._data_dir = data_dir
        self._clock = (time.time(), 0)
        """When this worker began, and after which step."""

    def went_back(self, step: int, damage: Sequence[str]) -> None:
        on = f"the job goes on from step {step}" if step else "the job begins anew"
        self._jobs.add_event(self._id, f"A checkpoint is damaged: {'; '.join(damage)}; {on}", level="warn")

    def started(self, done: int) -> None:
        self._clock = (time.time(), done)
        resumed = f", from step {done}" if done else ""
        self._jobs.add_event(self._id, f"Fine-tuning job started{resumed}", once=f"started {done}")

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        """An event, and when the job is expected to end."""
        loss = metrics.get("loss", math.nan)
        message = f"Step {step.number}/{step.of}: training loss={loss:.4f}"
        if "valid_loss" in metrics:
            message += f", validation loss={metrics['valid_loss']:.4f}"
        progress = {"step": step.number, "total_steps": step.of, "epoch": step.epoch, "train_loss": loss}
        data = _finite(progress | {**metrics})
        self._jobs.add_event(self._id, message, once=f"step {step.number}", data=data)
        began, done = self._clock
        left = (time.time() - began) / (step.number - done) * (step.of - step.number)
        self._jobs.set(self._id, estimated_finish=time.time() + left)

    def checkpointed(
        self, step: Step, version: ModelVersion, metrics: Mapping[str, float]
    ) -> Collection[int]:
        """One at the end of an epoch can be asked as a model."""
        if step.ends_epoch:
            finite = _finite(metrics)
            shown = {"step": step.number, "train_loss": finite.get("loss")}
            if "valid_loss" in finite:
                shown |= {"valid_loss": finite["valid_loss"], "full_valid_loss": finite["valid_loss"]}
            model = self._model(Path(version.location), version.digest, step.number)
            self._jobs.add_checkpoint(self._id, model | {"metrics": shown}, KEPT_CHECKPOINTS)
            event = f"Checkpoint created at step {step.number}"
            self._jobs.add_event(self._id, event, once=f"checkpoint {step.number}")
        self._jobs.set(self._id, attempts=0)
        rows, _ = self._jobs.checkpoints(self._id, None, KEPT_CHECKPOINTS)
        return {int(row["step"]) for row in rows}

    def finish(
        self,
        policy: Policy,
        weights: Mapping[str, Tensor],
        before: str,
        history: Sequence[Mapping[str, float]],
        tokens: int,
    ) -> None:
        """Write the model and the table of steps. Raises TrainingError when no weight has changed."""
        folder = self._data_dir / "models" / self._id
        with draft_of(folder) as draft:
            digest = policy.save_version(draft, 1, weights).digest
            if digest == before:
                raise TrainingError("training changed no weight; raise learning_rate_multiplier")
        results = f"file-{self._id.removeprefix('ftjob-')}"
        lines = [_line(number, metrics) for number, metrics in enumerate(history, start=1)]
        table = [_HEADER, *lines, ""]
        self._files.write_results(results, "step_metrics.csv", "\n".join(table))
        model = self._model(folder, digest, None) | {"metrics": {}}
        self._jobs.succeed(self._id, model, trained_tokens=tokens, result_files=[results])

    def _model(self, folder: Path, digest: str, step: int | None) -> Row:
        """The row of a model, whose folder is relative: the data folder may be moved."""
        values = self._job["hyperparameters"]
        rank = values["lora_rank"]
        return {
            "id": model_name(self._job["model"], self._job["suffix"], self._id, step),
            "created": time.time(),
            "job": self._id,
            "folder": str(folder.relative_to(self._data_dir)),
            "lora": {"r": rank, "alpha": values["lora_alpha"]} if rank else None,
            "digest": digest,
            "step": step,
        }


def _line(step: int, metrics: Mapping[str, float]) -> str:
    """A line of the table of steps; a number that is not finite is left out."""
    finite = _finite(metrics)
    return ",".join([str(step), *(f"{finite[name]:.6g}" if name in finite else "" for name in _COLUMNS)])


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
