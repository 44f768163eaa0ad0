"""The `cluster` block for the nodes of a Ray cluster, and whether these have room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from etude.cluster.connection import connected
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
    """GPUs for each learner, beside a CPU; left out: one where the cluster has any, unless the model's device
    is `cpu`."""
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

    def check(self, folder: Path | None, *, on_gpus: bool = True) -> list[Placement]:
        """Whether the nodes that are there now have room for runners and learners."""
        with connected(self.address, self.runtime_env, folder):
            import ray

            nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            room = self.learner_room(ray.cluster_resources(), on_gpus=on_gpus)
        learners = self.learners or 0
        groups = [
            ("runners", self.runners, self.runners, self.runner_room),
            ("learners", learners, self.fewest_learners or learners, room),
        ]
        return [placed(*group, nodes) for group in groups if group[1]]


def placed(
    what: str, count: int, fewest: int, room: Mapping[str, float], nodes: Sequence[dict[str, float]]
) -> Placement:
    """Whether processes have room on nodes, of whose resources it is taken; as many as `fewest` will do."""
    found, used = 0, 0
    for left in nodes:
        before = found
        while found < count and all(left.get(name, 0) >= amount for name, amount in room.items()):
            left.update({name: left[name] - amount for name, amount in room.items()})
            found += 1
        used += found > before
    each = ", ".join(f"{name}: {amount:g}" for name, amount in room.items())
    there = f"room for {found} of {count} {what} with {{{each}}} on {len(nodes)} nodes"
    if found < fewest:
        return Placement(what, f"{there}; ask for fewer, or add nodes: ray start --address=…", is_ready=False)
    if found < count:
        return Placement(what, f"{there}, and {fewest} will do")
    return Placement(what, f"{count} {what} on {used} of {len(nodes)} nodes of Ray")
