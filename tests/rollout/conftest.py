from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.inference.embedded import EmbeddedEngine
from etude.store.journal import Journal
from tests.rollout.running import tiny_engine


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal


@pytest.fixture(scope="package")
def engine() -> Iterator[EmbeddedEngine]:
    """A small model that is sampled here."""
    engine = tiny_engine()
    yield engine
    asyncio.run(engine.close())
