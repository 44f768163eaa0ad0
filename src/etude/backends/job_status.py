"""Where a job stands, said of its reference."""

from __future__ import annotations

from typing import Any

from etude.core.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum


def job_status(
    ref: TrainingJobRef,
    status: TrainingStatusEnum,
    progress: float | None = None,
    *,
    message: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> TrainingJobStatus:
    """The status of the job that `ref` names; `progress` in percent."""
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=ref.backend,
        status=status,
        progress=progress,
        message=message,
        metadata=metadata,
    )
