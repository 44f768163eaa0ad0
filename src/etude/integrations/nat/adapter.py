"""The toolkit's trainer adapter `etude_trainer_adapter`."""

from __future__ import annotations

from typing import Any

from nat.data_models.finetuning import TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from nat.finetuning import TrainerAdapter

from etude.backends import trainer_adapter
from etude.core.errors import RequestError
from etude.core.skipped import Skipped
from etude.integrations.nat.configs import EtudeTrainerAdapterConfig
from etude.integrations.nat.values import (
    from_toolkit,
    job_from_toolkit,
    job_to_toolkit,
    skipped_to_toolkit,
    status_to_toolkit,
)


class EtudeTrainerAdapter(TrainerAdapter):
    """A trainer adapter of Etude's, by the toolkit's interface."""

    def __init__(self, adapter_config: EtudeTrainerAdapterConfig) -> None:
        super().__init__(adapter_config)
        self._etude: trainer_adapter.TrainerAdapter | None = None

    @property
    def etude(self) -> trainer_adapter.TrainerAdapter:
        """The adapter that does the work. Raises RequestError before `etude_trainer` has started."""
        if self._etude is None:
            raise RequestError(
                "`etude_trainer_adapter` works within a trainer of `_type: etude_trainer` alone"
            )
        return self._etude

    def bind(self, etude: trainer_adapter.TrainerAdapter) -> None:
        """Hand over the adapter that does the work."""
        self._etude = etude

    async def is_healthy(self) -> bool:
        """Whether the backend answers and could train now."""
        return await self.etude.is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """See the toolkit. Submitting the same `run_id` again does not train twice."""
        ref = await self.etude.submit(from_toolkit(trajectories))
        if isinstance(ref, Skipped):
            kind = self.etude.adapter_config.type_name
            return skipped_to_toolkit(ref, trajectories.run_id, kind)
        return job_to_toolkit(ref)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """See the toolkit."""
        return status_to_toolkit(await self.etude.status(job_from_toolkit(ref)))

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """See the toolkit."""
        status = await self.etude.wait_until_complete(job_from_toolkit(ref), poll_interval)
        return status_to_toolkit(status)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """See the toolkit."""
        self.etude.log_progress(job_from_toolkit(ref), metrics, output_dir)
