"""Clusters of several nodes on this machine: raylets with one CPU each, and a head that trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.nodes import cluster_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes beside the head."""
    pytest.importorskip("ray")
    with cluster_of(1, 1) as started:
        yield started
