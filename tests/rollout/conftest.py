from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from etude.engines.embedded import EmbeddedEngine
from tests.rollout.running import tiny_engine


@pytest.fixture(scope="package")
def engine() -> Iterator[EmbeddedEngine]:
    """A small model that is sampled here."""
    engine = tiny_engine()
    yield engine
    asyncio.run(engine.close())
