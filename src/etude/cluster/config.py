"""The part of a cluster that trains."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator


class LearnersConfig(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """The processes that train a job together on a Ray cluster."""

    address: str = "auto"
    """The cluster: `auto` for the one that this machine is a node of, or `HOST:PORT` of its head."""
    learners: int = Field(default=1, ge=1)
    """Processes that train a job together, on as few nodes as have room for them."""
    fewest_learners: int | None = Field(default=None, ge=1)
    """Processes with which a job goes on, from its last checkpoint, when nodes are lost; left out: as many as
    `learners`, so that it waits for others to take their place."""
    learner_cpus: float = Field(default=1.0, gt=0)
    """CPUs that Ray sets aside for each of them."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """GPUs for each; left out: one where the cluster has any, unless the device is `cpu`."""
    learner_grace: float = Field(default=30.0, gt=0)
    """Seconds that a job waits for room for all of `learners`, before it goes on with fewer."""
    learner_wait: float = Field(default=300.0, gt=0)
    """Seconds that it waits for room for the fewest, before the attempt counts as failed."""

    @model_validator(mode="after")
    def _within(self) -> LearnersConfig:
        if self.fewest_learners is not None and self.fewest_learners > self.learners:
            raise ValueError(
                f"fewest_learners is {self.fewest_learners} and learners is {self.learners}: at most as many"
            )
        return self
