"""The `cluster` block for the nodes of a Ray cluster, and whether these have room and all that is needed."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field, model_validator

from etude.cluster.connection import connected
from etude.config.component import ClusterConfig, Placement
from etude.core.errors import StoreError, first_line
from etude.core.extras import install_command


@dataclass(frozen=True, slots=True)
class Group:
    """Processes of one kind."""

    what: str
    count: int
    fewest: int
    """As many as will do."""
    room: Mapping[str, float]
    """The resources for each, by Ray's names."""
    spread: bool = False
    """Whether they go to as many nodes as there are, and not to as few as have room."""


@dataclass(slots=True)
class Node:
    """A node, with what is left of it."""

    id: str
    address: str
    left: dict[str, float]
    counts: dict[str, int] = field(default_factory=dict)
    """The processes that it got, by what they are."""

    def room_for(self, each: Mapping[str, float]) -> int:
        """How many processes that take `each` have room."""
        return min((int(self.left.get(name, 0) / amount) for name, amount in each.items()), default=10**6)

    def take(self, group: Group) -> None:
        """Give a process of the group its room."""
        for name, amount in group.room.items():
            self.left[name] -= amount
        self.counts[group.what] = self.counts.get(group.what, 0) + 1


def nodes_there() -> list[Node]:
    """The nodes of the cluster that this process is connected with."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"])) for node in alive
    ]


def placed(group: Group, nodes: Sequence[Node]) -> Placement:
    """Place a group on what others have left of the nodes."""
    count = 0
    while count < group.count:
        roomy = [node for node in nodes if node.room_for(group.room)]
        if not roomy:
            break
        if group.spread:
            node = min(roomy, key=lambda node: node.counts.get(group.what, 0))
        else:
            node = max(roomy, key=lambda node: (node.counts.get(group.what, 0), node.room_for(group.room)))
        node.take(group)
        count += 1
    each = ", ".join(f"{name}: {amount:g}" for name, amount in group.room.items())
    lacking = f"there is room for {count} of {group.count} {group.what} with {{{each}}} on {len(nodes)} nodes"
    if count < group.fewest:
        remedy = "ask for fewer, or start more nodes: ray start --address=…"
        return Placement(group.what, f"{lacking}; {remedy}", is_ready=False)
    taken = [(node.address, node.counts[group.what]) for node in nodes if group.what in node.counts]
    where = ", ".join(f"{address} ({number})" for address, number in taken)
    if count < group.count:
        return Placement(group.what, f"{lacking}, and {group.fewest} will do: {where}")
    return Placement(
        group.what, f"{count} {group.what} on {len(taken)} of {len(nodes)} nodes of Ray: {where}"
    )


Facts: TypeAlias = tuple[bool, list[str], str | None]
"""Whether a file is there with its content, packages that are not installed, and Etude's version."""

_ANSWER_SECONDS = 60.0
_NEEDED = {"runners": ["etude"], "learners": ["etude", "torch", "transformers", "peft", "accelerate"]}


def problems(nodes: Sequence[Node], shared: Path | None) -> list[str]:
    """A sentence for each thing that a node with processes of ours lacks.

    Learners must see the folder `shared`, or the one that it will be made in. This process is connected with
    the cluster.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    problems, look = [], _look()
    with _marked(shared) as (path, content):
        asked = []
        for node in nodes:
            packages = sorted({name for what in node.counts for name in _NEEDED[what]})
            here = NodeAffinitySchedulingStrategy(node.id, soft=False)
            task: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(look)
            asked.append(task.remote(str(path), content, packages))
        for node, answer in zip(nodes, asked, strict=True):
            try:
                problems += _problems_of(node, ray.get(answer, timeout=_ANSWER_SECONDS), path)
            except (GetTimeoutError, RayError) as error:
                problems.append(f"node {node.address} runs no tasks: {first_line(error)}")
    return problems


def _look() -> Callable[[str, str, list[str]], Facts]:
    """The task of a node. It is sent by value, so that a node needs nothing of ours to run it."""

    def look(path: str, content: str, packages: list[str]) -> Facts:
        import importlib.metadata
        import importlib.util
        import pathlib

        lacking = [name for name in packages if importlib.util.find_spec(name) is None]
        try:
            sees = pathlib.Path(path).read_text(encoding="utf-8") == content
        except OSError:
            sees = False
        return sees, lacking, None if "etude" in lacking else importlib.metadata.version("etude")

    return look


def _problems_of(node: Node, facts: Facts, path: Path | None) -> list[str]:
    sees, lacking, installed = facts
    trains, own, problems = "learners" in node.counts, version("etude"), []
    if lacking:
        extra = "local,ray" if trains else "ray"
        problems.append(
            f"node {node.address} lacks {', '.join(lacking)}; there, as here: {install_command(extra)}"
        )
    elif installed != own:
        problems.append(f"node {node.address} has Etude {installed}, and this one {own}: install the same")
    if path is not None and trains and not sees:
        problems.append(
            f"node {node.address} does not see {path.parent}: where learners train, it is on storage that "
            "all nodes mount at the same path, and that the same user may read"
        )
    return problems


@contextlib.contextmanager
def _marked(folder: Path | None) -> Iterator[tuple[Path | None, str]]:
    """A file in the folder, or in the nearest one above that is there, and its content."""
    content = secrets.token_hex(16)
    if folder is None:
        yield None, content
        return
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        descriptor, name = tempfile.mkstemp(prefix=".etude-check-", dir=folder)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}; learners write into a folder there") from error
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        yield path, content
    finally:
        path.unlink(missing_ok=True)


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
    learner_cpus: float = Field(default=1.0, gt=0)
    """CPUs for each learner."""
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
        return {"CPU": self.learner_cpus} | ({"GPU": gpus} if gpus else {})

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
