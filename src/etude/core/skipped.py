"""A skip: work that was not done, on purpose, with its reason."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Skipped(BaseModel):
    """Stands in for a training job where there was nothing to train on. It is never a success."""

    model_config = ConfigDict(frozen=True)

    reason: str
    """One sentence for a person: what was missing, and why."""


class Frozen(Skipped):
    """Stands in for the job of a model that is not to be trained."""


class DryRun(Skipped):
    """Stands in for the job of a dry run: everything was made ready, and nothing was submitted."""

    rows: int
    """Rows of the data set that a real run would have submitted."""
