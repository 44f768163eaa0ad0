"""Fixtures of the command-line tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.killed import repeatable_project
from tests.cli.projects import local_project, scripted_project, succeed


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


@pytest.fixture
def deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    """The current folder, with a config that trains the tiny model the same each time."""
    monkeypatch.chdir(tmp_path)
    return repeatable_project(tmp_path, base)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A project with a run `r` of the tiny model: v1 and v2."""
    folder = tmp_path_factory.mktemp("trained")
    local_project(folder, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed("train", "config.yml", "--name", "r")
    return folder


@pytest.fixture
def after_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_once: Path) -> Path:
    """The current folder, with a copy of that project."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True))
