"""Clusters of several nodes on this machine: raylets with one CPU each, and a head that trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import model as model


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes beside the head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # As the tests themselves: others would be served first, and what is waited for last.
        patch.setenv("RAY_worker_niceness", "0")
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                started.add_node(num_cpus=1)
            yield started
        finally:
            started.shutdown()
