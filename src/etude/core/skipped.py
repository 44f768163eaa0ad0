"""A skip: work that was not done, on purpose, with its reason."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Skipped(BaseModel):
    """Stands in for a training job where there was nothing to train on. It is never a success."""

    model_config = ConfigDict(frozen=True)

    reason: str
    """One sentence for a person: what was missing, and why."""
