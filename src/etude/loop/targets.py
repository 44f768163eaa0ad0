"""Several models trained in one run: a trainer for each, and the loop that takes them together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.loop.epoch_trainer import EpochTrainer
from etude.loop.jobs import job_name
from etude.loop.loop import run_loop, submit_epoch
from etude.loop.summary import require_trained, summary_of_targets
from etude.loop.trainer import Trainer
from etude.store.log import note_targets


class TargetsTrainer(Trainer):
    """Trains the targets of a run side by side, on one set of episodes for each epoch.

    Each target has an `EpochTrainer` of its own: its own builder, adapter, versions, history and files
    (`targets/<name>/` in the run folder). The first target that is due runs an epoch's episodes; for the
    others they are in the journal, scored.
    """

    def __init__(self, trainer_config: TrainerConfig, members: Mapping[str, EpochTrainer]) -> None:
        """`members` are the trainers by target, their components and runtime bound."""
        super().__init__(trainer_config)
        self.members = dict(members)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare all targets, and take up the run where it was left."""
        self.run_config = run_config
        await note_targets(self.runtime.run.journal, self.members)
        for name, member in self.members.items():
            await member.initialize(run_config.for_target(name))

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, those of earlier processes included.

        Raises TrainingError when a job failed, new weights are not alive, or nothing was trained on.
        """
        run, progress = self.runtime.run, self.runtime.progress
        members = list(self.members.values())
        facts = {name: member.ledger.describe() for name, member in self.members.items()}
        progress.run_started(run.name, num_epochs, _described(facts))
        await run_loop(members, num_epochs, self.run_config, run.name, progress)
        summary = self.summary()
        run.write_json("summary.json", summary)
        for name, member in self.members.items():
            member.record.report(final=True)
            if not member.history.trained and not member.target.frozen:
                progress.message(f"{name}: was never trained in this run", warning=True)
        progress.finished(summary)
        return require_trained([member.history for member in members])

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Collect and submit the epoch of every target that is due.

        The ref names the jobs of all targets under `jobs` in its metadata.
        """
        jobs = await submit_epoch(list(self.members.values()), epoch, run_id)
        if not jobs:
            reasons = [member.history.epochs[-1].skipped for member in self.members.values()]
            told = "; ".join(reason for reason in reasons if reason is not None)
            return Skipped(reason=told or "no target is due in this epoch")
        names = {id(member): name for name, member in self.members.items()}
        refs = {names[id(member)]: ref.model_dump(mode="json") for member, ref in jobs}
        return TrainingJobRef(run_id=job_name(run_id, epoch, 0), backend="targets", metadata={"jobs": refs})

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of each target under `targets`. Raises ValueError for another run's id."""
        told = {name: await member.get_metrics(run_id) for name, member in self.members.items()}
        return self.summary() | {"targets": told}

    async def cleanup(self) -> None:
        """Free what the targets hold; what one of them raises does not stop the others."""
        outcomes = await asyncio.gather(
            *(member.cleanup() for member in self.members.values()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell who watches, and write the metrics files of all targets."""
        self.runtime.progress.trained(epoch + 1, metrics)
        for member in self.members.values():
            member.record.report(output_dir=output_dir)

    def summary(self) -> dict[str, Any]:
        """See `etude.loop.summary.summary_of_targets`."""
        histories = {name: member.history for name, member in self.members.items()}
        return summary_of_targets(self.runtime.run.name, histories)


def _described(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is the same for all targets, and each one's own by its name."""
    first = next(iter(facts.values()))
    common = {
        key: value for key, value in first.items() if all(told[key] == value for told in facts.values())
    }
    own = {
        name: {key: value for key, value in told.items() if key not in common} for name, told in facts.items()
    }
    return common | {f"target {name}": ", ".join(map(str, told.values())) for name, told in own.items()}
