"""A whole finetuning run, from a config and a run folder to trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.config.schema import Config
from etude.core.errors import RequestError, TrainingError
from etude.core.interfaces import Engine
from etude.core.job import TrainingJobStatus, TrainingStatusEnum
from etude.core.progress import Progress
from etude.loop.targets import assemble_trainer
from etude.report.run_report import RunReport
from etude.runtime import Report, open_runtime
from etude.store.run_folder import RunFolder
from etude.store.summary import summary_in


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has done."""

    statuses: list[TrainingJobStatus]
    """Of its training jobs, in order."""
    summary: dict[str, Any]
    """See `etude.store.summary.summary_in`; also in the run folder as `summary.json`."""


async def finetune(
    config: Config,
    run: RunFolder,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> Outcome:
    """Train as the config says, or go on with what the run folder has of it already.

    Raises RequestError when the config asks for what cannot be done (nothing was sampled by then),
    and another EtudeError when the work failed. What was collected stays in the run folder.
    """
    if not config.finetuning.enabled:
        raise RequestError("finetuning is not enabled in this config; set 'finetuning.enabled: true'")
    opened = open_runtime(config, run, progress=progress, report=report or RunReport(), engines=engines)
    async with opened as runtime:
        trainer = await assemble_trainer(runtime)
        try:
            await trainer.initialize(run_config=config.finetuning)
            statuses = await trainer.run(config.finetuning.num_epochs)
        finally:
            await trainer.cleanup()
    _require_success(statuses)
    return Outcome(statuses, summary_in(run.journal, run.name))


def _require_success(statuses: list[TrainingJobStatus]) -> None:
    """A trainer that somebody else wrote may return failures instead of raising them."""
    if not statuses:
        raise TrainingError("the run trained on nothing: the trainer returned no training job")
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            told = f": {status.message}" if status.message else ""
            raise TrainingError(f"job {status.run_id} ({status.backend}) ended as '{status.status}'{told}")
