"""The assembly of trainers: one for each trained model of a run, and one that trains several together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import cast

from etude.config.builder import TargetBuilder
from etude.config.finetuning import FinetuneConfig
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutputItem
from etude.core.history import History
from etude.core.interfaces import Progress
from etude.core.job import TrainingJobStatus
from etude.loop.interface import Trainer
from etude.loop.record import require_trained
from etude.loop.recording_wrappers import RecordedTrainer
from etude.loop.trainer import EpochTrainer, run_loop
from etude.runtime import Runtime
from etude.store.facts import SUMMARY
from etude.store.figures import summary_in
from etude.store.log import note_targets


async def assemble_trainer(runtime: Runtime) -> RecordedTrainer | RecordedTargets:
    """Return the config's trainer with its builder, its adapter and the runtime. It is not initialized yet.

    With `finetuning.targets`, there is a trainer for each target. Raises RequestError when the config's
    trainer cannot train several.
    """
    config = runtime.config
    if not config.finetuning.targets:
        return await _assemble(runtime)
    shared = SharedProgress(runtime.progress)
    members = {name: await _assemble_member(name, runtime, shared) for name in config.finetuning.targets}
    return RecordedTargets(members, replace(runtime, progress=shared))


async def _assemble(runtime: Runtime) -> RecordedTrainer:
    finetuning, builder = runtime.config.finetuning, runtime.builder
    trajectory_builder = await builder.get_trajectory_builder(
        _named(finetuning.trajectory_builder, "trajectory_builder")
    )
    adapter = await builder.get_trainer_adapter(_named(finetuning.trainer_adapter, "trainer_adapter"))
    trainer: Trainer = await builder.get_trainer(_named(finetuning.trainer, "trainer"))
    return RecordedTrainer(trainer, trajectory_builder, adapter, runtime)


async def _assemble_member(name: str, runtime: Runtime, shared: SharedProgress) -> RecordedTrainer:
    builder = TargetBuilder(runtime.builder, name)
    own = builder.config.finetuning
    member = replace(
        runtime,
        config=builder.config,
        builder=builder,
        target_model=_named(own.target_model, "target_model"),
        target=name,
        target_config=runtime.config.finetuning.targets[name],
        progress=shared.view(name),
    )
    recorded = await _assemble(member)
    if not isinstance(recorded.trainer, EpochTrainer):
        kind = type(recorded.trainer).__name__
        raise RequestError(
            f"finetuning.trainer '{own.trainer}' is a {kind}, which trains one model; "
            "'finetuning.targets' needs `_type: epochs`, or a trainer that inherits from EpochTrainer"
        )
    return recorded


def _named(name: str | None, key: str) -> str:
    if name is None:
        raise RequestError(f"'finetuning.{key}' is missing: name an entry of '{key}s'")
    return name


class RecordedTargets:
    """Trains the targets of a run together, on one set of episodes per epoch.

    Each target has its own `EpochTrainer`, builder, adapter, versions, history and files (`targets/<name>/`
    in the run folder). The first target that is due runs an epoch's episodes. The others read them from the
    journal, scored.
    """

    def __init__(self, members: Mapping[str, RecordedTrainer], runtime: Runtime) -> None:
        """`members` are the recorded `EpochTrainer`s by target."""
        self.members = dict(members)
        self._runtime = runtime

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare all targets, and continue the run where it was left."""
        await note_targets(self._runtime.run.journal, self.members)
        for name, member in self.members.items():
            await member.initialize(run_config.for_target(name))

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, including the epochs of earlier processes.

        Raises TrainingError when a job failed, its weights cannot be adopted, or nothing was trained on.
        """
        run, progress, block = self._runtime.run, self._runtime.progress, self._runtime.config.finetuning
        books = {name: member.trainer.bookkeeper for name, member in self.members.items()}
        facts = {name: each.describe() for name, each in books.items()}
        # The facts that all targets share, and the rest under each target's name.
        first, *others = facts.values()
        shared = {key: value for key, value in first.items() if all(other[key] == value for other in others)}
        own = {
            f"target {name}": ", ".join(str(value) for key, value in each.items() if key not in shared)
            for name, each in facts.items()
        }
        progress.run_started(run.name, num_epochs, shared | own)
        trainers = [cast("EpochTrainer", member.trainer) for member in self.members.values()]
        await run_loop(trainers, num_epochs, block, run.name, progress)
        histories: dict[str | None, History] = {name: each.record.history for name, each in books.items()}
        summary = summary_in(histories, run.name).as_json()
        run.write_json(SUMMARY, summary)
        for name, each in books.items():
            each.record.report(final=True)
            if not each.record.history.trained and not each.runtime.target_config.frozen:
                progress.message(f"{name}: was never trained in this run", warning=True)
        progress.finished(summary)
        return require_trained([*histories.values()])

    async def cleanup(self) -> None:
        """Free the resources of the targets, even if one of them raises."""
        async with AsyncExitStack() as exits:
            for member in self.members.values():
                exits.push_async_callback(member.cleanup)


class SharedProgress(Progress):
    """One progress for several targets. It reports shared episodes once.

    When one target has begun a phase, the next one does not begin it again while it reads the same episodes
    from the journal. The reported rewards are then the first target's. A target may also have its own
    episodes, if its builder asks for other plays or for more. With the first of them it begins the phase
    again, without a total.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._begin(None)
        # These events concern the run as a whole.
        self.run_started = progress.run_started  # type: ignore[method-assign]
        self.message = progress.message  # type: ignore[method-assign]
        self.alarm = progress.alarm  # type: ignore[method-assign]
        self.finished = progress.finished  # type: ignore[method-assign]

    def _begin(self, phase: str | None) -> None:
        self._phase = phase
        self._speaker: str | None = None
        self._told: set[str] = set()
        """The ids of the reported episodes."""
        self._unscored: set[tuple[str, str, int]] = set()
        """The target, example and generation of episodes whose scores are not reported yet."""

    def view(self, target: str) -> Progress:
        """Return the progress that the trainer of one target reports to."""
        view = Progress()
        for event in ("trained", "skipped", "validated", "alarm"):
            setattr(view, event, getattr(self.progress, event))
        for event, method in (
            ("phase", self._phase_of),
            ("episode_finished", self._episode_of),
            ("scored", self._scored_by),
            ("message", self._message_of),
        ):
            setattr(view, event, partial(method, target))
        return view

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """Begin an epoch, with no phase yet."""
        self._begin(None)
        self.progress.epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase that belongs to no single target."""
        self._begin(name)
        self.progress.phase(name, total)

    def _phase_of(self, target: str, name: str, total: int | None = None) -> None:
        if name != self._phase or self._speaker == target:
            self.phase(name, total)
            self._speaker = target

    def _episode_of(self, target: str, episode: EpisodeRecord) -> None:
        if episode.id in self._told:
            return
        if self._speaker != target and self._phase is not None:
            self.progress.phase(self._phase)
            self._speaker = target
        self._told.add(episode.id)
        self._unscored.add((target, episode.example.id, episode.generation))
        self.progress.episode_finished(episode)

    def _scored_by(self, target: str, item: EvalOutputItem) -> None:
        key = (target, item.id, item.generation)
        if key in self._unscored:
            self._unscored.remove(key)
            self.progress.scored(item)

    def _message_of(self, target: str, text: str, *, warning: bool = False) -> None:
        self.progress.message(f"{target}: {text}", warning=warning)
