"""Liveness: whether a job made new weights, and whether the next tokens come from them."""

from __future__ import annotations

from etude.core.errors import TrainingError
from etude.core.job import ModelVersion


def check_changed(
    before: ModelVersion | None, after: ModelVersion, job: str, start: ModelVersion | None = None
) -> None:
    """Raise TrainingError unless the job made new weights, under a number that follows that of `before`.

    `start` is the version that the job started from, where that is not `before`.
    """
    if before is None:
        return
    if after.digest == (start or before).digest:
        raise TrainingError(
            f"job {job} says that it is completed, and the weights have not changed (digest {after.digest}). "
            "Check the learning rate, and that the trajectories have differing rewards."
        )
    if after.number <= before.number:
        raise TrainingError(
            f"job {job} made version {after.number}, and version {before.number} was there before it; "
            "versions must count upwards"
        )


def check_adopted(engine_version: int, version: ModelVersion, model: str) -> None:
    """Raise TrainingError unless the engine samples from the new weights."""
    if engine_version != version.number:
        raise TrainingError(
            f"the model {model!r} still samples from version {engine_version} after adopting version "
            f"{version.number} ({version.location}): the policy sampled next would not be the one trained"
        )
