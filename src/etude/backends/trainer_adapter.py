"""The interface of trainer adapters, which send trajectories to training backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from etude.backends.capabilities import Capabilities, JobHyperparameters
from etude.config.finetuning import FinetuneConfig, TrainerAdapterConfig
from etude.core.conversion import TrajectoryCollection
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.return_checks import wrap_implementations
from etude.store.files import append_json_line

_FIRST_PAUSE = 0.25
_BACKOFF = 1.5


class TrainerAdapter(ABC):
    """The interface to a training backend, which trains on trajectories in jobs.

    Open connections, models and processes in `initialize`, not in the constructor. A run wraps the adapter to
    record its jobs (`etude.loop.recording_wrappers`). A method whose return value does not match its declared
    type raises WrongReturnError.
    """

    run_config: FinetuneConfig
    """The `finetuning` block, set by `initialize`."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        """Keep the config. Nothing is started here."""
        self.adapter_config = adapter_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts it as None
        self.job_log: Path | None = None
        """A file for facts about jobs that are logged without a folder. None keeps nothing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make every implementation check its return values against the interface."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, TrainerAdapter)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the backend. If that fails, raises an EtudeError that says what to do."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    def capabilities(self) -> Capabilities:
        """Return the backend's capabilities, also before `initialize`, so that a bad config costs nothing."""
        return Capabilities()

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int | None:
        """Return the most tokens that a job on the collection would be charged for, over all its epochs.
        Return None if training is not charged by the token.

        A run with a budget reserves that much before it submits the job.
        """
        return None

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Set hyperparameters of the next jobs. Values that are not None replace the config's.

        Raises CapabilityError that names the values that the backend does not accept.
        """
        hyperparameters.refuse_all_but((), self.adapter_config.type_name)

    unhealthy_because: str | None = None
    """Why `is_healthy` last returned False, if the adapter knows."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Return whether the backend answers and could train now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start a training job on the collection.

        `trajectories.run_id` names the job. Name and content together are its idempotency key: submitting the
        same again, from this process or a later one, must not train twice. Return the ref of the existing
        job. If its work was lost (a killed in-process job), start it again from the version last given to
        `restore`. If the name belongs to a job with other data, another method, other hyperparameters or
        another start model, raise JobNameTakenError. If the data are too few to train on, return Skipped with
        the reason. A collection of a method that the backend does not support raises CapabilityError.
        """

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the job's current status.

        A job unknown to the backend has the status NOT_FOUND. It is not an error, because a resumed run asks
        for jobs of a killed process. With the capability `versions`, a completed job has the `version` that
        it made. `metrics` in the metadata holds the numbers to show.
        """

    @abstractmethod
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for a final status and return it. `poll_interval` is in seconds.

        The trainer bounds the wait: it cancels the coroutine after a timeout. A backend in this process waits
        for the job itself and does not poll.
        """

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append facts about a job to `<backend>_jobs.jsonl` in `output_dir`, or to `job_log` by default."""
        path = self.job_log if output_dir is None else Path(output_dir) / f"{ref.backend}_jobs.jsonl"
        if path is not None:
            append_json_line(path, {"run_id": ref.run_id, **metrics})

    async def current_version(self) -> ModelVersion | None:
        """Return the weights that the next job starts from, or None if the backend does not tell."""
        return None

    async def restore(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make the next job start from `version`. Called when a run resumes, and before each job.

        A backend that keeps its own state needs nothing here.
        """

    async def count_from(self, number: int) -> None:  # noqa: B027  # a hook with a sound default
        """Number the next version higher than `number`. Numbers up to it are or were in use.

        Called before each job. A backend whose own numbers always rise needs nothing here.
        """

    async def begin_from(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make `version`, which a warm-up made, the start of training instead of the base model.

        Called after the warm-up, and when such a run resumes. A backend that keeps an optimiser, a learning
        rate schedule or a reference model between jobs resets them to `version`.
        """

    async def damage(self, version: ModelVersion) -> list[str]:
        """Return how the stored files that a job needs to start from `version` differ from the written ones.

        The result has one clause per file, and is empty for an undamaged version. Called before `initialize`
        with the version that a run would resume from. A run goes back from a damaged version to the last
        undamaged one. A backend that keeps its own state needs nothing here.
        """
        return []

    async def go_back(self, version: ModelVersion) -> list[str]:
        """Set aside everything stored for versions after `version`. Their jobs are run again.

        Called before `initialize`. Return the new names.
        """
        return []

    async def keep(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make `version`, the best measured so far, survive the end of this process.

        A backend that stores each version when its job ends needs nothing here.
        """

    async def prune(self, keep: Collection[ModelVersion]) -> None:  # noqa: B027  # a hook with a sound default
        """Delete stored weights of this run's versions that are not in `keep`, never the base model.

        Doing nothing is allowed.
        """

    async def cancel(self, ref: TrainingJobRef) -> None:  # noqa: B027  # a hook with a sound default
        """Stop the job if it still runs. An unknown or finished job is not an error."""

    async def cleanup(self) -> None:  # noqa: B027  # a hook with a sound default
        """Free the resources of `initialize`. Calling it twice is fine."""


def pauses(usual: float, longest: float) -> Iterator[float]:
    """Yield the seconds between polls of a remote job, without end.

    They start short, for short jobs. After reaching `usual` they grow slowly to `longest`.
    """
    pause = min(_FIRST_PAUSE, usual)
    while True:
        yield pause
        pause = min(2 * pause, usual) if pause < usual else max(usual, min(pause * _BACKOFF, longest))


def job_status(ref: TrainingJobRef, status: TrainingStatusEnum, **more: Any) -> TrainingJobStatus:
    """Return a status for the job of `ref`, with `more` of its fields."""
    return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, **more)
