"""Fixtures of the command-line tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.projects import local_project, scripted_project


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process draw nothing, which takes half of a small run; those in others do."""
    monkeypatch.setattr("etude.report.files.render_reward_plot", lambda history: b"")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config whose parts need no torch."""
    monkeypatch.chdir(tmp_path)
    scripted_project(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt nothing yet."""
    from etude.models.tiny import build_policy, build_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "base"
    build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(folder)
    return folder


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    """The current folder, with a config that trains the tiny model."""
    monkeypatch.chdir(tmp_path)
    local_project(tmp_path, base)
    return tmp_path
