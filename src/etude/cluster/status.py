"""The nodes of a cluster, as Ray knows them now."""

from __future__ import annotations

from etude.store.status import ClusterNode, ClusterStatus


def cluster_status(address: str, dashboard: str | None) -> ClusterStatus | None:
    """The nodes of the cluster that this process is connected with; None where its head does not answer."""
    import ray

    try:
        here, known = ray.get_runtime_context().get_node_id(), ray.nodes()
        free = ray.available_resources()
    except (ray.exceptions.RayError, RuntimeError, ConnectionError):
        return None
    nodes = [
        ClusterNode(
            address=str(node["NodeManagerAddress"]),
            name=str(node["NodeManagerHostname"]),
            is_alive=bool(node["Alive"]),
            is_head=node["NodeID"] == here,
            resources=node["Resources"],
        )
        for node in known
    ]
    return ClusterStatus(address=address, dashboard=dashboard, nodes=nodes, free=free)
