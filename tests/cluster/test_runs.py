"""Training runs whose episodes are played on several nodes, killed, and gone on with here or there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import base as base
from tests.cli.killed import everything, killed_after, repeatable_project
from tests.cli.projects import change, events, finished, train_two_models

pytestmark = pytest.mark.cluster

HERE = ("-o", "cluster=null")


@pytest.fixture
def project(tmp_path: Path, base: Path) -> Path:
    return repeatable_project(tmp_path, base)


def whole(project: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """How many events a run has that nothing happens to, and all that it keeps."""
    command = ("train", "config.yml", "--name", "run", "-o", "storage=null", *options, "--json")
    run = finished(*command, folder=project)
    assert run.returncode == 0, run.stderr
    kept = everything(project / "runs" / "run")
    shutil.rmtree(project / "runs")
    return len(events(run.stdout)), kept


def changed(expected: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The steps that are not the same, as they should be and as they are."""
    keys = expected.keys() | kept.keys()
    return {key: (expected.get(key), kept.get(key)) for key in keys if expected.get(key) != kept.get(key)}


@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
@pytest.mark.parametrize("begins", ["here", "there"])
def test_a_run_that_is_killed_again_and_again_goes_on_with_and_without_the_cluster(
    project: Path, cluster: Any, begins: str, ahead: bool
) -> None:
    change(project / "config.yml", finetuning__collect_ahead=ahead)
    count, expected = whole(project)
    there = ("--on", cluster.address)
    places = [(), there] if begins == "here" else [there, HERE]
    command, choice = ("train", "config.yml", "--name", "run", "-o", "storage=null"), random.Random(begins)
    for number in range(4):
        seconds, seen = choice.random() * 0.2, choice.randint(2, count // 2)
        if not killed_after(seen, seconds, *command, *places[number % 2], folder=project):
            break
        command, places = ("resume", "run"), [there, HERE] if begins == "there" else [HERE, there]
    last = finished("resume", "run", *there, "--json", folder=project)
    assert last.returncode == 0, last.stderr
    assert changed(expected, everything(project / "runs" / "run")) == {}


def test_a_run_on_the_cluster_whose_head_is_lost_goes_on_from_its_storage(
    project: Path, cluster: Any
) -> None:
    """The folder is gone, and another process makes it anew from the backup: first here, then there."""
    count, expected = whole(project)
    there, address = ("--on", cluster.address), f"file://{project}/storage/run"
    command: tuple[str, ...] = ("train", "config.yml", "--name", "run", *there)
    choice = random.Random(1)
    for where in (HERE, there, there):
        killed_after(choice.randint(count // 3, count // 2), 0.1, *command, folder=project)
        shutil.rmtree(project / "runs")
        command = ("resume", address, *where)
    last = finished(*command, "--json", folder=project)
    assert last.returncode == 0, last.stderr
    assert events(last.stdout)[0]["event"] == "restored"
    assert everything(project / "runs" / "run") == expected


def test_several_models_are_trained_on_nodes_as_they_are_here(
    project: Path, base: Path, cluster: Any
) -> None:
    train_two_models(project, base)
    count, expected = whole(project)
    begin = ("train", "config.yml", "--name", "run", "--on", cluster.address, "-o", "storage=null")
    assert killed_after(count // 2, 0.1, *begin, folder=project)
    last = finished("resume", "run", "--json", folder=project)
    assert last.returncode == 0, last.stderr
    assert everything(project / "runs" / "run") == expected
