"""A cluster of Ray's on this machine: several nodes with a raylet each, and a head that runs nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

MEMORY = 80_000_000
"""Bytes of each node's object store: nothing large goes through it."""


@contextmanager
def start_cluster(*cpus: int) -> Iterator[Any]:
    """Ray's `Cluster` with a node for each number of CPUs, beside the head."""
    # Ray's processes run at a niceness of 15, where others would be served first.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray spells it so
    logging.getLogger("ray").setLevel(logging.ERROR)
    import ray
    from ray.cluster_utils import Cluster

    # Each idle worker that Ray starts ahead costs seconds of CPU time. A lost node is missed within 2 s.
    system = {
        "prestart_worker_first_driver": False,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
    }
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": system})
    with ExitStack() as exits:
        exits.callback(cluster.shutdown)
        exits.callback(ray.shutdown)
        cluster.folders = exits.enter_context(TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True))
        for count in cpus:
            add_node(cluster, count)
        yield cluster


def add_node(cluster: Any, cpus: int) -> Any:
    """Start a node with so many CPUs, and a folder of its own, as a machine has.

    Nodes that share one unpack the code anew and take it from each other. Workers' prints come to the driver
    by a log monitor, which `Cluster` leaves out of all nodes but the head.
    """
    folder = mkdtemp(dir=cluster.folders)
    return cluster.add_node(
        num_cpus=cpus, object_store_memory=MEMORY, temp_dir=folder, include_log_monitor=True
    )
