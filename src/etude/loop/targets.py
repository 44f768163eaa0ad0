"""The assembly of trainers: one for each trained model of a run, and one that trains several together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

from etude.config.builder import TargetBuilder
from etude.config.finetuning import FinetuneConfig
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.core.job import TrainingJobStatus
from etude.loop.interface import Trainer
from etude.loop.recording_wrappers import RecordedTrainer
from etude.loop.trainer import EpochTrainer, run_epochs
from etude.runtime import Runtime
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
    # An enabled block names all of these.
    block, builder = runtime.config.finetuning, runtime.builder
    trajectory_builder = await builder.get_trajectory_builder(str(block.trajectory_builder))
    adapter = await builder.get_trainer_adapter(str(block.trainer_adapter))
    trainer: Trainer = await builder.get_trainer(str(block.trainer))
    return RecordedTrainer(trainer, trajectory_builder, adapter, runtime)


async def _assemble_member(name: str, runtime: Runtime, shared: SharedProgress) -> RecordedTrainer:
    builder = TargetBuilder(runtime.builder, name)
    own = builder.config.finetuning
    member = replace(
        runtime,
        config=builder.config,
        builder=builder,
        target_model=str(own.target_model),
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
        trainers = [cast("EpochTrainer", member.trainer) for member in self.members.values()]
        return await run_epochs(trainers, num_epochs, self._runtime.config.finetuning, self._runtime)

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

    def __init__(self, display: Progress) -> None:
        self.display: Progress = display
        self.begin(None)

    def begin(self, phase: str | None) -> None:
        """Begin a phase that belongs to no target yet, or an epoch with no phase yet."""
        self.current = phase
        self.speaker: str | None = None
        self.told: set[str] = set()
        """The ids of the reported episodes."""
        self.unscored: set[tuple[str, str, int]] = set()
        """The target, example and generation of episodes whose scores are not reported yet."""

    def view(self, target: str) -> Progress:
        """Return the progress that the trainer of one target reports to."""
        return _TargetProgress(self, target)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.begin(None)
        super().epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase that belongs to no single target."""
        self.begin(name)
        super().phase(name, total)


class _TargetProgress(Progress):
    """The progress of one target of a run."""

    def __init__(self, shared: SharedProgress, target: str) -> None:
        self.display, self._shared, self._target = shared, shared, target

    def phase(self, name: str, total: int | None = None) -> None:
        if name != self._shared.current or self._shared.speaker == self._target:
            super().phase(name, total)
            self._shared.speaker = self._target

    def episode_finished(self, episode: EpisodeRecord) -> None:
        shared = self._shared
        if episode.id in shared.told:
            return
        if shared.speaker != self._target and shared.current is not None:
            shared.display.phase(shared.current)
            shared.speaker = self._target
        shared.told.add(episode.id)
        shared.unscored.add((self._target, episode.example.id, episode.generation))
        super().episode_finished(episode)

    def scored(self, item: EvalOutputItem) -> None:
        if (key := (self._target, item.id, item.generation)) in self._shared.unscored:
            self._shared.unscored.remove(key)
            super().scored(item)

    def message(self, text: str, *, warning: bool = False) -> None:
        super().message(f"{self._target}: {text}", warning=warning)
