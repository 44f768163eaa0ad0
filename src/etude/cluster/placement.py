"""Where the processes of a `cluster` block would be placed, by what its nodes have in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.config.component import Placement


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
