"""The order of a server's job: its processes train from a file to a new model's weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from etude.algorithms.algorithm import load_algorithms
from etude.backends.job_training import JobData, JobTraining, Row, units_of_rows
from etude.backends.job_worker import JobFolder, JobOrder, News, NewsListener
from etude.core.errors import TrainingError
from etude.core.training_rows import ROW_OF
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule
from etude.learner.team import Team
from etude.models.weights import digest, save_tensors
from etude.server.files import read_rows
from etude.server.hyperparameters import job_algorithm
from etude.server.models import ServedModel, load_policy_of_job
from etude.server.settings import ServerSettings
from etude.show.logs import show_logs
from etude.store.files import WEIGHTS_FILE, open_draft

_LOG = logging.getLogger("etude.server.worker")


class ServerOrder(JobOrder):
    """The order of a server's job."""

    settings: ServerSettings
    """The server's settings, without its key and with the resolved number of training processes."""
    method: str
    values: dict[str, Any]
    """The job's hyperparameters."""
    seed: int
    start: ServedModel
    training_file: Path
    validation_file: Path | None
    made: Path
    """The folder of the new model."""

    def show_logs(self) -> None:
        show_logs(self.settings.log_level)
        _LOG.debug("order: %s", self.model_dump_json())

    def train(self, folder: JobFolder, team: Team, stopping: Event) -> None:
        """Train the job, and write its model.

        Raises TrainingError for rows that the model cannot take, and if no weight has changed.
        """
        load_algorithms(self.settings.algorithms)
        loading: dict[str, Any] = self.loading(team)
        values, algorithm = self.values, job_algorithm(self.method, self.values)
        settings = replace(self.settings, **loading)
        keeps_reference = "reference" in algorithm.needs()
        policy = load_policy_of_job(settings, self.start, values, self.seed, keeps_reference)
        before = policy.digest()
        options = LearnerOptions(
            learning_rate=values["learning_rate"] * values["learning_rate_multiplier"],
            schedule=Schedule(values["lr_schedule"], values["warmup_steps"]),
            gradient_checkpointing=values["gradient_checkpointing"],
        )

        def read_units(file: Path | None) -> Sequence[Row]:
            rows: Any = () if file is None else read_rows(file, ROW_OF[algorithm.kind])
            return units_of_rows(rows, policy, algorithm)

        data = JobData(
            algorithm,
            read_units(self.training_file),
            read_units(self.validation_file),
            passes=values["n_epochs"],
            batch_size=values["batch_size"],
            seed=self.seed,
            key=("epoch",),
        )
        learner, steps = Learner(policy, options, team), settings.checkpoint_steps
        training = JobTraining(learner, data, NewsListener(folder), folder.checkpoints, steps)
        training.run(Event(), stopping)
        weights = team.whole(policy.trainable())
        if not team.leads:
            return
        with open_draft(self.made) as draft:
            draft.mkdir(parents=True)
            save_tensors(weights, draft / WEIGHTS_FILE)
            if (made := digest(weights)) == before:
                raise TrainingError("training changed no weight; raise learning_rate_multiplier")
        folder.add_news(News(kind="done", digest=made, trained_tokens=data.count_trained_tokens(training)))
