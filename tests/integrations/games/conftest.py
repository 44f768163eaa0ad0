from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.store.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal
