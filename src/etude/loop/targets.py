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


async def _assemble_member(name: str, runtime: Runtime, shared: Progress) -> RecordedTrainer:
    builder = TargetBuilder(runtime.builder, name)
    own = builder.config.finetuning
    member = replace(
        runtime,
        config=builder.config,
        builder=builder,
        target_model=str(own.target_model),
        target=name,
        target_config=runtime.config.finetuning.targets[name],
        progress=TargetProgress(shared, name),
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
    """One progress for several targets. It reports once what they share.

    A target that reads the episodes of another one from the journal begins the same phase, with the same
    total. The reported rewards are then the first target's.
    """

    def __init__(self, display: Progress) -> None:
        self.display: Progress = display
        self._phase: tuple[str, int | None] | None = None
        self._finished: set[str] = set()
        self._scored: set[tuple[str, int]] = set()
        """The examples and generations whose rewards the phase has reported."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self._phase = None
        self._finished.clear()
        super().epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        if (name, total) != self._phase:
            self._phase = (name, total)
            self._scored.clear()
            super().phase(name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        if episode.id not in self._finished:
            self._finished.add(episode.id)
            super().episode_finished(episode)

    def scored(self, item: EvalOutputItem) -> None:
        if (item.id, item.generation) not in self._scored:
            self._scored.add((item.id, item.generation))
            super().scored(item)


class TargetProgress(Progress):
    """The progress of one target of a run. Its messages begin with the target's name."""

    def __init__(self, display: Progress, target: str) -> None:
        self.display, self._target = display, target

    def message(self, text: str, *, warning: bool = False) -> None:
        super().message(f"{self._target}: {text}", warning=warning)
