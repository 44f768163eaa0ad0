"""The interface of trainer adapters: where trajectories are trained on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.backends.capabilities import Capabilities, JobHyperparameters
from etude.config.finetuning import FinetuneConfig, TrainerAdapterConfig
from etude.core.edge import TrajectoryCollection
from etude.core.implementations import wrap_implementations
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.store.files import append_json_line

if TYPE_CHECKING:
    from openai.types.fine_tuning import FineTuningJobEvent

_FIRST_PAUSE = 0.25
_BACKOFF = 1.5


class TrainerAdapter(ABC):
    """Sends trajectories to a training backend and follows the jobs.

    Connections, models and processes belong into `initialize`, not into the constructor. Within a run,
    its jobs are recorded around it (`etude.loop.recorded`). What a method returns that is not what it is
    declared to raises WrongReturnError.
    """

    run_config: FinetuneConfig
    """The `finetuning` block, from `initialize` on."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        """Keep the config. Nothing is started here."""
        self.adapter_config = adapter_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts it as None
        self.job_log = JobLog(None)
        """For facts about jobs that come without a folder; it keeps nothing unless it is replaced."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have every implementation held to the interface."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, TrainerAdapter)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the backend. Raises an EtudeError that says what to do when that cannot be done."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    def capabilities(self) -> Capabilities:
        """The abilities of the backend, known before `initialize`, so that a wrong config costs nothing."""
        return Capabilities()

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int | None:
        """The tokens that a job on them would be charged for at most, all of its epochs counted; None where
        training is not charged so.

        A run with a budget holds room for that much before it submits the job.
        """
        return None

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Train from now on with these, where they say something, in place of the config's.

        Raises CapabilityError that names those which the backend cannot be given.
        """
        hyperparameters.refuse_all_but((), self.adapter_config.type_name)

    unhealthy_because: str | None = None
    """Why `is_healthy` said no last, where the adapter knows."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend answers and could train now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start a training job on the collection.

        `trajectories.run_id` names the job and is, with its content, its idempotency key: submitting
        the same again, from this process or a later one, must not train twice. Return the ref of the
        job that is there, or, when its work was lost (a killed in-process job), start it anew from the
        version that `restore` was last given. A name that belongs to a job with other data, another
        method, other hyperparameters or another start model raises JobNameTakenError. A backend that
        will not train on so little data returns Skipped with the reason; a collection of another
        method raises CapabilityError.
        """

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands now.

        A job that the backend does not know has the status NOT_FOUND: it is not an error, because a
        resumed run asks after jobs of a process that was killed. A completed job of a backend with
        the capability `versions` has the `version` that it made; `metrics` in the metadata holds the
        numbers to show.
        """

    @abstractmethod
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for a final status and return it; `poll_interval` in seconds.

        The trainer bounds the wait and cancels the coroutine when it takes too long. A backend in
        this process waits for the job itself and does not poll.
        """

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append facts about a job to `<backend>_jobs.jsonl` in `output_dir`, or else to `job_log`."""
        path = None if output_dir is None else Path(output_dir) / f"{ref.backend}_jobs.jsonl"
        (self.job_log if path is None else JobLog(path)).add(ref.run_id, metrics)

    async def current_version(self) -> ModelVersion | None:
        """The weights that the next job starts from; None when the backend does not say."""
        return None

    async def restore(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make the next job start from `version`. Called when a run is resumed, and before each job.

        A backend that keeps its own state needs nothing here.
        """

    async def count_from(self, number: int) -> None:  # noqa: B027  # a hook with a sound default
        """Number the next version higher than `number`: those up to it are taken, or were once.

        Called before each job. A backend whose own numbers only ever rise needs nothing here.
        """

    async def begin_from(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Take `version`, which a warm-up made, for what training begins with, in place of the base model.

        Called once the warm-up is over, and when such a run is resumed. A backend that keeps an optimiser, a
        learning rate schedule or a reference model from job to job starts these anew there.
        """

    async def damage(self, version: ModelVersion) -> list[str]:
        """How the stored weights of `version`, and what else a job needs to start from it, differ from what
        was written: a clause for each file. None for a version that is whole.

        Called before `initialize` for the version that a run would go on from: a run goes back from a damaged
        one to the last that is whole. A backend that keeps its own state needs nothing here.
        """
        return []

    async def go_back(self, version: ModelVersion) -> list[str]:
        """Set aside all that is stored of later versions than `version`: their jobs are made again.

        Called before `initialize`; gives the names under which they are now.
        """
        return []

    async def keep(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Have `version`, which was measured and is the best so far, outlast this process.

        A backend that stores each version when its job ends needs nothing here.
        """

    async def prune(self, keep: Collection[ModelVersion]) -> None:  # noqa: B027  # a hook with a sound default
        """Delete the stored weights of this run's versions that are not in `keep`, never the base model.

        Doing nothing is allowed.
        """

    async def cancel(self, ref: TrainingJobRef) -> None:  # noqa: B027  # a hook with a sound default
        """Stop the job if it still runs. An unknown or finished job is no error."""

    async def cleanup(self) -> None:  # noqa: B027  # a hook with a sound default
        """Free what `initialize` took. Calling it twice is fine."""


def pauses(usual: float, longest: float) -> Iterator[float]:
    """Seconds between looks at a job that runs elsewhere, without end.

    The first ones are short, for jobs that are; from `usual` on they grow slowly to `longest`.
    """
    pause = min(_FIRST_PAUSE, usual)
    while pause < usual:
        yield pause
        pause *= 2
    pause = usual
    while True:
        yield pause
        pause = max(usual, min(pause * _BACKOFF, longest))


def job_status(ref: TrainingJobRef, status: TrainingStatusEnum, **more: Any) -> TrainingJobStatus:
    """The status of the job that `ref` names, with `more` of its fields."""
    return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, **more)


class JobLog:
    """Appends facts about jobs to a file, one JSON object a line; each event of the API once."""

    def __init__(self, path: Path | None) -> None:
        """None keeps nothing."""
        self._path = path
        self._seen: set[str] | None = None

    def add(self, job: str, facts: Mapping[str, Any]) -> None:
        """Append facts about a job."""
        if self._path is not None:
            append_json_line(self._path, {"run_id": job, **facts})

    def add_events(self, job: str, events: Sequence[FineTuningJobEvent]) -> None:
        """Append the events that are not in the file yet, also not from an earlier process."""
        if self._path is None:
            return
        if self._seen is None:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            self._seen = set(re.findall(r'"event": "([^"]+)"', text))
        for event in events:
            if event.id not in self._seen:
                self._seen.add(event.id)
                facts = event.model_dump(
                    mode="json", include={"level", "message", "type", "data", "created_at"}
                )
                self.add(job, {"event": event.id, **{key: value for key, value in facts.items() if value}})
