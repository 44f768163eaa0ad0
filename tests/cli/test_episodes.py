"""`etude episodes`: lists that words filter, and one episode."""

from __future__ import annotations

import json

import pytest

from tests.cli.projects import etude


@pytest.fixture
def evaluated(project):
    """A run with episodes."""
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    return project


def listed(*words):
    shown = etude("episodes", "--json", *words)
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_episodes_are_listed_and_filtered(evaluated):
    everything = listed("e")
    assert everything and all(each["phase"] == "eval" for each in everything)
    right, wrong = listed("e", "reward=1"), listed("e", "--", "-reward=1")
    assert sorted(each["id"] for each in right + wrong) == [each["id"] for each in everything]
    assert listed("e", "failed") == []
    assert len(listed("e", "--limit", "1")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["e", "reward<x"], "reward<0.5"),
        (["e", "--phase", "train/9"], "there are: eval"),
        (["show"], "name one episode"),
        (["show", "train/1/x/0"], "no episode"),
        (["nothing"], "there is no run"),
    ],
)
def test_what_cannot_be_done_is_said(evaluated, words, said):
    shown = etude("episodes", *words)
    assert shown.exit_code == 2 and said in shown.stderr
