"""A process that is killed while it writes a version: at each of its file operations, for real."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from etude.jobs.folders import StateFolders
from etude.learner.learner import Learner, LearnerOptions
from etude.store.files import put_in_place, write_atomically
from tests.file_operations import each_operation, killed_at
from tests.models.tiny_models import fresh_policy


def is_killed_at(count: int, folder: Path, work) -> bool:
    """Whether a process that does `work` is killed at its `count`-th operation on files in `folder`."""
    child = os.fork()
    if child == 0:
        try:
            each_operation(str(folder), killed_at(count))
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_version_is_whole_or_not_there_wherever_its_process_is_killed(tmp_path, stride):
    learner = Learner(fresh_policy(), LearnerOptions())
    versions = StateFolders(tmp_path, "v", "version")
    state = learner.snapshot()
    versions.write(1, {"job": "one"}, learner, state)
    count, there = 1, set()
    while is_killed_at(count, tmp_path, lambda: versions.write(2, {"job": "two"}, learner, state)):
        assert versions.damage(1) == []
        if 2 in versions.numbers():
            assert versions.damage(2) == []
            assert versions.facts(2)["job"] == "two"
            versions.prune({1})
        there.add(len(list(tmp_path.glob("v2*"))))
        versions.delete_drafts()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v1"]
        count += stride
    assert versions.damage(2) == []
    assert count > 15
    assert there == {0, 1}


def test_so_are_versions_that_are_deleted(tmp_path):
    learner = Learner(fresh_policy(), LearnerOptions())
    versions = StateFolders(tmp_path, "v", "version")
    state, count = learner.snapshot(), 1
    versions.write(1, {"job": "one"}, learner, state)
    while is_killed_at(count, tmp_path, lambda: versions.prune(())):
        assert versions.numbers() == [] or versions.damage(1) == []
        versions.delete_drafts()
        if not versions.numbers():
            versions.write(1, {"job": "one"}, learner, state)
        count += 1
    assert versions.numbers() == []
    assert count > 5


def test_a_text_is_the_old_one_or_the_new_one(tmp_path):
    path, texts, count = tmp_path / "config.yml", set(), 1
    write_atomically(path, "old")
    while is_killed_at(count, tmp_path, lambda: write_atomically(path, "new" * 10_000)):
        texts.add(path.read_text())
        write_atomically(path, "old")
        assert [each.name for each in tmp_path.iterdir()] == ["config.yml"]
        count += 1
    assert path.read_text() == "new" * 10_000
    assert texts == {"old", "new" * 10_000}


def test_a_folder_in_the_place_of_another_is_whole_or_a_draft(tmp_path):
    def work() -> None:
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "file").write_text("new")
        put_in_place(tmp_path / "draft", tmp_path / "v1")

    count = 1
    while is_killed_at(count, tmp_path, work):
        assert not (tmp_path / "v1").exists() or (tmp_path / "v1" / "file").read_text() == "new"
        for path in (*tmp_path.glob("*/*"), *tmp_path.glob("*")):
            path.unlink() if path.is_file() else path.rmdir()
        count += 1
    assert (tmp_path / "v1" / "file").read_text() == "new"
