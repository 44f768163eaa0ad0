"""Fixtures of the trackers' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import base, local
from tests.cli.conftest import project as whole
from tests.cli.projects import change, rows

__all__ = ["base", "local", "project", "whole"]


@pytest.fixture
def project(whole: Path) -> Path:
    """The project of the commands' tests, with smaller epochs."""
    change(whole / "config.yml", trajectory_builders__grpo__num_generations=2)
    (whole / "validation.jsonl").write_text(rows(2, "v"))
    return whole
