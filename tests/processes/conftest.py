"""Clusters of several nodes on this machine: raylets with one CPU each, and a head that trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes.nodes import start_cluster
from tests.server.conftest import model as model


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes beside the head."""
    pytest.importorskip("ray")
    with start_cluster(1, 1) as started:
        yield started
