"""The `cluster` block for the nodes of a Ray cluster: `_type: ray`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from etude.cluster.connection import connected
from etude.cluster.placement import Group, nodes_there, placed
from etude.cluster.survey import problems
from etude.config.component import ClusterConfig, Placement


class RayConfig(ClusterConfig, name="ray"):
    """The nodes of a Ray cluster, of which this machine is one."""

    address: str = "auto"
    """`auto` for the cluster that this machine is a node of, or `HOST:PORT` of its head."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each runner."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs for each runner."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other resources for each runner, by the names that the nodes were given."""
    fewest_learners: int | None = Field(default=None, ge=1)
    """Learners with which a job goes on, from its last checkpoint, when nodes are lost; left out: as many as
    `learners`, so that it waits for others to take their place."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """GPUs for each learner; left out: one where the cluster has any, unless the model's device is `cpu`."""
    learner_grace: float = Field(default=30.0, gt=0)
    """Seconds that a job waits for room for all of `learners`, before it goes on with fewer."""
    learner_wait: float = Field(default=300.0, gt=0)
    """Seconds that it waits for room for the fewest, before the attempt counts as failed."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of runners and learners. Left out, the config's folder goes along as
    `working_dir`, so that modules beside the config are found."""

    @model_validator(mode="after")
    def _within(self) -> RayConfig:
        if self.fewest_learners is not None and self.fewest_learners > (self.learners or 0):
            raise ValueError(
                f"fewest_learners is {self.fewest_learners} and learners is {self.learners or 'left out'}: "
                "at most as many"
            )
        return self

    def gpus(self, *, on_gpus: bool = True) -> float:
        """Those of runners and learners."""
        each = float(on_gpus) if self.learner_gpus is None else self.learner_gpus
        return self.runners * self.num_gpus + (self.learners or 0) * each

    @property
    def runner_room(self) -> dict[str, float]:
        """The resources for each runner, by Ray's names."""
        room = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in room.items() if amount}

    def learner_room(self, cluster: Mapping[str, float], *, on_gpus: bool) -> dict[str, float]:
        """The resources for each learner on a cluster that has these in all."""
        gpus = self.learner_gpus
        if gpus is None:
            gpus = 1.0 if on_gpus and cluster.get("GPU") else 0.0
        return {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})

    def check(
        self, folder: Path | None, *, on_gpus: bool = True, shared: Path | None = None
    ) -> list[Placement]:
        """Where runners and learners would be placed on the nodes that are there now, and what these lack."""
        with connected(self.address, self.runtime_env, folder):
            import ray

            nodes, room = nodes_there(), self.learner_room(ray.cluster_resources(), on_gpus=on_gpus)
            groups = [Group("runners", self.runners, self.runners, self.runner_room, spread=True)]
            if self.learners:
                groups.append(Group("learners", self.learners, self.fewest_learners or self.learners, room))
            placements = [placed(group, nodes) for group in groups if group.count]
            lacking = problems([node for node in nodes if node.counts], shared)
        return [*placements, *(Placement("nodes", problem, is_ready=False) for problem in lacking)]
