"""A small training run that is real but for its model and its backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from etude.backends.trainer_adapter import Capabilities, TrainerAdapter
from etude.config.builder import Builder
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig, TrainerAdapterConfig
from etude.config.schema import Config
from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.core.interfaces import Progress
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.loop.recording_wrappers import RecordedTrainer
from etude.loop.trainer import EpochTrainer, EpochTrainerConfig
from etude.rollout.collector import Collector, Limits
from etude.rollout.evaluation import JournalledEvaluation
from etude.rollout.evaluator import FunctionEvaluator
from etude.rollout.workflow import Workflow
from etude.runtime import Report, Runtime
from etude.show.metrics_files import write_metrics
from etude.store.run_folder import RunFolder
from tests.support import ScriptedEngine


async def play(example: Example, episode: Any) -> str:
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text


def correct(example: Example, output: str) -> float:
    return float(output == "yes")


def examples(count: int, prefix: str = "e") -> list[Example]:
    return [Example(f"{prefix}{number}", {"question": f"question {number}"}) for number in range(count)]


def learning_engine(log: Path | None = None, base: int = 30, step: int = 15) -> ScriptedEngine:
    """Says yes in `base` % of its answers, and `step` % more with each version."""

    def answer(request: ChatRequest) -> str:
        return "yes" if request.key % 100 < base + step * engine.version else "no"

    engine = ScriptedEngine(answer, log=log)
    return engine


class FakeAdapterConfig(TrainerAdapterConfig, name="fake"):
    """A backend that trains by counting."""


class FakeAdapter(TrainerAdapter):
    """Keeps its jobs in a folder, as a remote backend would; each job makes the next version.

    `lose_jobs` forgets earlier processes' jobs. `behave` may change a job's final status, or raise.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capabilities: Capabilities | None = None,
        lose_jobs: bool = False,
        behave: Callable[[TrainingJobStatus], Any] = lambda status: status,
    ) -> None:
        super().__init__(FakeAdapterConfig())
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.kept: list[int] = []
        self.after_submit: Callable[[str], None] = lambda name: None
        """Called when a job is there and its submission not yet answered."""
        self.before_status: Callable[[str], None] = lambda name: None
        self.cancels = True
        """Whether `cancel` has an effect."""
        self.slow: set[str] = set()
        """Jobs that go on running, by name."""
        self.behave = behave
        self._capabilities = capabilities or Capabilities(versions=True)
        self._lose_jobs = lose_jobs
        self._version = version(0)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: Any) -> TrainingJobRef:
        name = trajectories.run_id
        self.submitted.append(name)
        job = self.folder / f"{name}.json"
        if not job.exists() or self._lose_jobs:
            made = version(self._version.number + 1)
            job.write_text(json.dumps(made.model_dump() | {"trajectories": len(trajectories)}))
        self.after_submit(name)
        return TrainingJobRef(run_id=name, backend="fake")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        self.before_status(ref.run_id)
        job = self.folder / f"{ref.run_id}.json"
        unknown = TrainingJobStatus(run_id=ref.run_id, backend="fake", status=TrainingStatusEnum.NOT_FOUND)
        if not job.exists() or (self._lose_jobs and ref.run_id not in self.submitted):
            return unknown
        if ref.run_id in self.slow:
            return unknown.model_copy(update={"status": TrainingStatusEnum.RUNNING})
        told = json.loads(job.read_text())
        self._version = max(self._version, version(told["number"]), key=lambda made: made.number)
        metadata = {"metrics": {"loss": numpy.float32(1.0), "trajectories": told.pop("trajectories")}}
        done = {"status": TrainingStatusEnum.COMPLETED, "version": ModelVersion(**told), "metadata": metadata}
        return unknown.model_copy(update=done)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        found = self.behave(await self.status(ref))
        status = await found if asyncio.iscoroutine(found) else found
        if status.status is TrainingStatusEnum.COMPLETED and status.version is not None:
            self._version = status.version
        return status

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Nothing to record."""

    async def current_version(self) -> ModelVersion:
        return self._version

    async def restore(self, version: ModelVersion) -> None:
        self._version = version

    async def prune(self, keep: Any) -> None:
        self.kept = [one.number for one in keep]

    async def cancel(self, ref: TrainingJobRef) -> None:
        self.cancelled.append(ref.run_id)
        if self.cancels:
            (self.folder / f"{ref.run_id}.json").unlink()

    async def cleanup(self) -> None:
        """Nothing to free."""


def version(number: int) -> ModelVersion:
    return ModelVersion(number=number, location=f"weights-{number}", digest=f"digest-{number}")


class Interrupted(BaseException):
    """Stands for Ctrl-C at a chosen point."""


def interrupt(found: object) -> None:
    raise Interrupted


class Watcher(Progress):
    """Remembers the events that a test asks about."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.warnings: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None:
        self.events.append(name)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.events.append(f"epoch {epoch}")

    def trained(self, epoch: int, metrics: Any) -> None:
        self.events.append(f"trained {epoch}")

    def skipped(self, epoch: int, reason: str) -> None:
        self.events.append(f"skipped {epoch}: {reason}")

    def validated(self, epoch: int, metrics: Any) -> None:
        self.events.append(f"validated {epoch}")

    def message(self, text: str, *, warning: bool = False) -> None:
        (self.warnings if warning else self.events).append(text)


class Run:
    """A run folder with everything around it; `await start()` trains until the end or an error."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.settings = settings
        """Keys of the epoch trainer's config."""
        self.engine = learning_engine()
        self.adapter = FakeAdapter(path.parent / "backend")
        self.builder: Any = CollectingBuilder(Grpo(num_generations=4))
        self.watcher = Watcher()
        self.examples = examples(3)
        self.validation: list[Example] = []
        reward = RewardFunctionConfig(name="correct")
        self.finetuning = FinetuneConfig(enabled=True, reward_function=reward, target_model="policy")
        self.evaluator: Callable[..., Any] = correct
        self.workflow: Callable[..., Any] = play
        self.make_trainer: Callable[[], Any] | None = None
        """For a trainer that is not an `EpochTrainer` of those settings."""
        # Without the plot: drawing takes longer than everything else in a test.
        self.report: Report = lambda history, folder, final: write_metrics(history, folder)

    def restart(self) -> Run:
        """The same run in a new process: same folder and backend, new engine, trainer and builder."""
        again = Run(self.path, **self.settings)
        for name in ("examples", "validation", "finetuning", "evaluator", "workflow", "make_trainer"):
            setattr(again, name, getattr(self, name))
        return again

    async def start(self, num_epochs: int = 3) -> Any:
        folder = (
            RunFolder.open(self.path) if self.path.exists() else RunFolder.create(self.path.parent, "run")
        )
        make_trainer = self.make_trainer or (lambda: EpochTrainer(EpochTrainerConfig(**self.settings)))
        with folder:
            trainer = RecordedTrainer(make_trainer(), self.builder, self.adapter, self._runtime(folder))
            try:
                await trainer.initialize(run_config=self.finetuning)
                self.statuses = await trainer.run(num_epochs)
            finally:
                await trainer.cleanup()
        return trainer

    def models(self, folder: RunFolder) -> dict[str, Any]:
        """The engines that its agent asks."""
        return {"policy": self.engine}

    def _runtime(self, folder: RunFolder) -> Runtime:
        models = self.models(folder)
        workflow = Workflow("play", self.workflow)
        collector = Collector(workflow, models, folder.journal, limits=Limits(8, 30.0, 10))
        evaluators = {"correct": FunctionEvaluator(self.evaluator)}
        return Runtime(
            run=folder,
            builder=Builder(Config()),
            evaluation=JournalledEvaluation(
                collector, evaluators, folder.journal, error_budget=self.finetuning.error_budget
            ),
            examples=self.examples,
            engines=models,
            target_model="policy",
            validation_examples=self.validation,
            progress=self.watcher,
            report=self.report,
        )
