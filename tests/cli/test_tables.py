"""Tables in terminals and in pipes: nothing is cut."""

from __future__ import annotations

import shutil

import pytest
from typer.testing import CliRunner

from etude.cli.app import app
from tests.cli.projects import etude, scripted_project

NAME = "a-long-name-of-a-run-that-nobody-would-like-to-type-again-项目"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project with a run in it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        scripted_project(folder)
        assert etude("train", "config.yml", "--name", NAME).exit_code == 0
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The current folder, with a copy of that project."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "copy"))
    return tmp_path / "copy"


def shown_at(columns, *arguments):
    """The lines of a command's output where a terminal has so many columns."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_in_a_pipe_each_row_is_a_line(run):
    listed = shown_at("", "runs", "list")
    (row,) = [line for line in listed if NAME in line and "next: " not in line]
    assert "train" in row and "finished" in row and "2/2" in row
    jobs = shown_at("", "jobs", NAME)
    assert sum("completed" in line and f"{NAME}-epoch-" in line for line in jobs) == 2
