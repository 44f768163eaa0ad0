"""One job, from its file to a new model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from torch import Tensor

from etude.core.errors import TrainingError
from etude.core.keys import fold
from etude.core.training_rows import ROW_OF
from etude.export.draft import draft_of
from etude.learner.learner import Learner, Snapshot
from etude.learner.team import Team
from etude.models.policy import LoraOptions, Policy
from etude.server.files import FileStore
from etude.server.hyperparameters import job_algorithm
from etude.server.ids import model_name
from etude.server.job_data import (
    Step,
    Units,
    batch_of,
    has_gradient,
    learner_options,
    plan_steps,
    trained_tokens,
    units_of,
)
from etude.server.job_folder import JobFolder
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.pages import Row
from etude.server.training_file import read_rows
from etude.server.weights import load_policy

KEPT_CHECKPOINTS = 3
"""Checkpoints of a job that can be asked as models: those of its last epochs."""

RESULTS_HEADER = "step,train_loss,learning_rate,tokens_per_s,valid_loss"


class Interrupted(Exception):
    """The worker was asked to make way; the job goes on later."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs, and on what."""

    data_dir: Path
    source: str
    """The base model's folder or name."""
    device: str
    dtype: str
    checkpoint_steps: int


class JobTraining:
    """Trains one job step by step, and can stop and go on after each.

    Every process of the team has one; that of the leader writes and tells.
    """

    def __init__(
        self, place: Place, job: Row, jobs: JobStore, files: FileStore, models: ModelStore, team: Team
    ) -> None:
        """Load model and rows, and go to the newest checkpoint.

        Raises TrainingError for rows that the model cannot take, ApiError for a model or file that is gone.
        """
        self._place = place
        self._team = team
        self._job = job
        self._jobs = jobs
        self._files = files
        self._values: Mapping[str, Any] = job["hyperparameters"]
        self._folder = JobFolder(place.data_dir, job["id"])
        self._algorithm = job_algorithm(job["method"], self._values)
        self._policy = self._load(models)
        self._start_digest = self._policy.digest()
        self._rows = self._read(job["training_file"])
        self._validation = self._read(job["validation_file"]) if job["validation_file"] else []
        live = [has_gradient(units) for units in self._rows]
        values = self._values
        self._steps = plan_steps(live, values["n_epochs"], values["batch_size"], job["seed"])
        options = learner_options(values, len(self._steps))
        self._learner = Learner(self._policy, options, job["seed"], team)
        self._done = self._folder.newest()
        self._results: list[str] = []
        if self._done:
            self._results = self._folder.load(self._done, self._policy, self._learner)["results"]
        if team.leads:
            self._folder.prune(self._public_steps() | {self._done})

    def run(self, canceled: Event, stopping: Event) -> None:
        """Take the steps that are left, and make the new model.

        Raises TrainingCanceled when `canceled` is set, Interrupted when `stopping` is, after a checkpoint.
        """
        if self._team.leads:
            went_on = f", from step {self._done}" if self._done else ""
            told = f"Fine-tuning job started{went_on}"
            self._jobs.tell(self._job["id"], told, once=f"started {self._done}")
        clock = (time.time(), self._done)
        for step in self._steps[self._done :]:
            metrics = self._take(step, canceled)
            self._done = step.number
            if self._team.leads:
                self._report(step, metrics, clock)
            due = step.number % self._place.checkpoint_steps == 0
            interrupted = self._team.any(stopping.is_set())
            if step.ends_epoch or due or interrupted:
                self._require_same_weights(step)
                snapshot = self._learner.snapshot()
                if self._team.leads:
                    self._save(step, metrics, snapshot)
            if interrupted:
                raise Interrupted
        weights = self._team.whole(self._policy.trainable())
        if self._team.leads:
            self._finish(weights)

    def _load(self, models: ModelStore) -> Policy:
        model, values = models.get(self._job["model"]), self._values
        fresh = values["lora_rank"] > 0 and model.lora is None
        lora = LoraOptions(values["lora_rank"], values["lora_alpha"]) if fresh else None
        policy = load_policy(
            self._place.source,
            model,
            device=self._place.device,
            dtype=self._place.dtype,
            lora=lora,
            seed=fold(self._job["seed"], "lora"),
            keep_base=self._algorithm.needs_reference and values.get("reference") == "base",
        )
        if self._algorithm.needs_reference:
            # Where nothing else is kept: the model that the job starts from, wherever it resumes.
            policy.keep_base()
        return policy

    def _read(self, file: str) -> list[Units]:
        rows = read_rows(self._files.path(file), ROW_OF[self._algorithm.kind])
        return units_of(rows, self._policy, self._algorithm)

    def _take(self, step: Step, canceled: Event) -> dict[str, float]:
        batch = batch_of(self._rows[row] for row in step.rows)
        metrics = self._learner.train(batch, self._algorithm, canceled=canceled)
        if self._validation and step.ends_epoch:
            metrics["valid_loss"] = self._learner.evaluate(batch_of(self._validation), self._algorithm)[
                "loss"
            ]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _report(self, step: Step, metrics: dict[str, float], clock: tuple[float, int]) -> None:
        """An event, a line of the results, and when the job is expected to end."""
        loss, of = metrics.get("loss", math.nan), len(self._steps)
        columns = ("loss", "learning_rate", "tokens_per_s", "valid_loss")
        values = [f"{metrics[name]:.6g}" if name in metrics else "" for name in columns]
        self._results.append(",".join([str(step.number), *values]))
        data = {"step": step.number, "total_steps": of, "epoch": step.epoch, "train_loss": loss, **metrics}
        told = f"Step {step.number}/{of}: training loss={loss:.4f}"
        if "valid_loss" in metrics:
            told += f", validation loss={metrics['valid_loss']:.4f}"
        finite = {name: value for name, value in data.items() if math.isfinite(value)}
        self._jobs.tell(self._job["id"], told, once=f"step {step.number}", data=finite)
        began, before = clock
        left = (time.time() - began) / (step.number - before) * (of - step.number)
        self._jobs.set(self._job["id"], estimated_finish=time.time() + left)

    def _require_same_weights(self, step: Step) -> None:
        """Raise TrainingError when the processes have come to hold different weights."""
        if self._team.size > 1 and not self._team.shards and not self._team.same(self._policy.digest()):
            raise TrainingError(
                f"after step {step.number} the processes hold different weights; are their devices of one "
                "kind? Start the server with --training-processes 1"
            )

    def _save(self, step: Step, metrics: dict[str, float], snapshot: Snapshot) -> None:
        """A checkpoint to go on from; at the end of an epoch also one that can be asked as a model."""
        kept = {"results": self._results}
        digest = self._folder.save(step.number, kept, self._policy, self._learner, snapshot)
        if step.ends_epoch:
            name = model_name(self._job["model"], self._job["suffix"], self._job["id"], step.number)
            facts = {"step": step.number, "train_loss": metrics.get("loss")}
            if "valid_loss" in metrics:
                facts |= {"valid_loss": metrics["valid_loss"], "full_valid_loss": metrics["valid_loss"]}
            row = self._model_row(name, self._folder.step_folder(step.number), digest)
            self._jobs.add_checkpoint(
                self._job["id"], row | {"step": step.number, "metrics": facts}, KEPT_CHECKPOINTS
            )
            told = f"Checkpoint created at step {step.number}"
            self._jobs.tell(self._job["id"], told, once=f"checkpoint {step.number}")
        self._jobs.set(self._job["id"], attempts=0)
        self._folder.prune(self._public_steps() | {step.number})

    def _finish(self, weights: Mapping[str, Tensor]) -> None:
        folder = self._place.data_dir / "models" / self._job["id"]
        with draft_of(folder) as draft:
            digest = self._policy.save_version(draft, 1, weights).digest
            if digest == self._start_digest:
                raise TrainingError("training changed no weight; raise learning_rate_multiplier")
        results = f"file-{self._job['id'].removeprefix('ftjob-')}"
        text = "\n".join([RESULTS_HEADER, *self._results, ""])
        self._files.write_results(results, "step_metrics.csv", text)
        name = model_name(self._job["model"], self._job["suffix"], self._job["id"])
        self._jobs.succeed(
            self._job["id"],
            self._model_row(name, folder, digest) | {"metrics": {}},
            trained_tokens=sum(trained_tokens(self._rows[row]) for one in self._steps for row in one.rows),
            result_files=[results],
        )
        self._folder.prune(self._public_steps())

    def _model_row(self, name: str, folder: Path, digest: str) -> dict[str, Any]:
        rank = self._values["lora_rank"]
        return {
            "id": name,
            "created": time.time(),
            "job": self._job["id"],
            "folder": self._folder.relative(folder),
            "lora": {"r": rank, "alpha": self._values["lora_alpha"]} if rank else None,
            "digest": digest,
            "step": None,
        }

    def _public_steps(self) -> set[int]:
        rows, _ = self._jobs.checkpoints(self._job["id"], None, KEPT_CHECKPOINTS)
        return {int(row["step"]) for row in rows}
