"""Which episodes are ready to be shown while a run goes on, by a journal alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.store.journal import Journal
from etude.trackers.live import EpisodeFeed, part_of


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as opened:
        yield opened


async def play(journal: Journal, name: str, failure: Any = None) -> None:
    await journal.put(f"{name}/call/0", {})
    await journal.put(name, {"episode": name, "calls": ["0"], "failure": failure})


async def score(journal: Journal, name: str, evaluator: str, error: str | None = None) -> None:
    await journal.put(f"{name}/score/{evaluator}", {"score": 1.0, "reasoning": None, "error": error})


async def test_an_episode_is_ready_with_its_last_score_or_when_it_failed(journal):
    feed = EpisodeFeed(["a", "b"])
    await play(journal, "train/1/x/0")
    await score(journal, "train/1/x/0", "a")
    await play(journal, "train/1/x/1", ["raised", "no", "agent"])
    assert feed.ready(journal) == ["train/1/x/1"]
    await score(journal, "train/1/x/0", "b")
    assert feed.ready(journal) == ["train/1/x/1", "train/1/x/0"]
    feed.shown(["train/1/x/1", "train/1/x/0"])
    await score(journal, "train/1/x/0", "b")
    assert feed.ready(journal) == []


async def test_what_could_not_be_shown_is_ready_the_next_time_too(journal):
    feed = EpisodeFeed(["a"])
    await play(journal, "eval/x/0")
    await score(journal, "eval/x/0", "a")
    assert feed.ready(journal) == feed.ready(journal) == ["eval/x/0"]


async def test_a_score_that_an_evaluator_failed_to_give_may_be_made_again(journal):
    feed = EpisodeFeed(["a"])
    await play(journal, "train/1/x/0")
    await score(journal, "train/1/x/0", "a", error="no answer")
    assert feed.ready(journal) == []
    assert list(feed.rest(journal, "train/1")) == ["train/1/x/0"]
    await score(journal, "train/1/x/0", "a")
    assert feed.ready(journal) == ["train/1/x/0"]


async def test_the_rest_of_a_part_is_what_was_not_shown_of_that_part_alone(journal):
    feed = EpisodeFeed(["a"])
    for name in ("train/1/x/0", "train/1/x/1", "train/1.2/x/0", "train/10/x/0", "validation/1/x/0"):
        await play(journal, name)
    feed.shown(["train/1/x/0"])
    assert list(feed.rest(journal, "train/1")) == ["train/1.2/x/0", "train/1/x/1"]
    feed.end("train/1")
    await play(journal, "train/1/y/0", ["raised", "no", "agent"])
    assert feed.ready(journal) == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train/3/t1/0", "train/3"),
        ("train/3.2/t1/0", "train/3"),
        ("validation/12/a/b/0", "validation/12"),
        ("warm-up/2/t1/0", "warm-up"),
        ("eval/t1/0", "eval"),
    ],
)
def test_each_episode_is_of_one_part(name, part):
    assert part_of(name) == part
