"""The words that filter episodes."""

from __future__ import annotations

import math

import pytest

from etude.core.episode import EpisodeRecord, Example, Failure
from etude.core.errors import RequestError
from etude.store.episodes import encode_episode
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, find_episodes, outlines, parse_query
from tests.store.test_long_runs import LATEST_FIRST
from tests.store.test_long_runs import phases_journal as phases  # noqa: F401


def outline(**facts):
    said = facts.pop("said", [])
    whole = {"id": "train/1/e/0", "phase": "train/1", "example": "e", "generation": 0, "inputs": {}}
    whole |= {"expected": None, "output": "x", "failure": None, "seconds": 1.0, "stored": said}
    return EpisodeOutline(**{**whole, **facts})


@pytest.mark.parametrize(
    ("words", "fits", "not_"),
    [
        ("failed:timeout", {"failure": Failure("timeout", "late")}, {"failure": Failure("raised", "no")}),
        ("-failed", {}, {"failure": Failure("timeout", "late")}),
        ("drifted", {"drifted": 1}, {}),
        ("retried", {"retries": 1}, {}),
        ("unscored", {}, {"reward": 0.0}),
        ("reward<0.5", {"reward": 0.4}, {"reward": 0.5}),
        ("reward<0.5", {"reward": 0.4}, {"reward": None}),
        ("style=1", {"scores": {"style": 1.0}}, {"scores": {"style": None}}),
        ("tokens>10 calls<=2", {"tokens": 11, "calls": 2}, {"tokens": 11, "calls": 3}),
        ("agent:solver", {"agents": {"solver", "x"}}, {"agents": {"x"}}),
        ("version>3", {"versions": {2, 4}}, {"versions": {3}}),
        ("version:3", {"versions": {3}}, {"versions": {4}}),
        ("apples", {"said": [{"content": "Twelve APPLES"}]}, {"said": [{"content": "pears"}]}),
        ('"twelve apples"', {"said": [["Twelve apples"]]}, {"said": [["apples, twelve"]]}),
        ("text:é", {"said": [["café"]]}, {"said": [["cafe"]]}),
        ("assistant", {"said": [["an assistant"]]}, {"said": [{"role": "assistant"}]}),
    ],
)
def test_words(words, fits, not_):
    query = parse_query(words)
    assert query.fits(outline(**fits)) and not query.fits(outline(**not_))


@pytest.mark.parametrize("words", ["reward<", "reward<x", 'an "open'])
def test_what_cannot_be_meant_is_refused(words):
    with pytest.raises(RequestError):
        parse_query(words)


def test_no_words_fit_everything():
    assert not parse_query("  ") and parse_query("").fits(outline())


async def test_episodes_are_found_from_phase_to_phase(phases):  # noqa: F811
    query = parse_query("-failed")
    first = find_episodes(phases, LATEST_FIRST, None, query, limit=4)
    assert [each.phase for each in first.episodes] == LATEST_FIRST[:4] and first.phase == LATEST_FIRST[3]
    rest = LATEST_FIRST[LATEST_FIRST.index(first.phase) :]
    others = find_episodes(phases, rest, None, query, after=first.after)
    assert [each.phase for each in others.episodes] == LATEST_FIRST[4:] and others.phase is None


async def test_ids_within_ids_and_numbers_that_are_no_json(tmp_path):
    """An example may be called as another one's episodes, and a score need not be finite."""
    ids = ["eval/a/0", "eval/a/0-b/0", "eval/a/0/0", "eval/a/0/1", "eval/a/1", "eval/a/10"]
    with Journal(tmp_path / "run.db") as journal:
        for id in ids:
            example = Example(id.removeprefix("eval/").rpartition("/")[0], {"x": math.inf})
            record = EpisodeRecord(id=id, example=example, generation=int(id.rpartition("/")[2]))
            await journal.put(id, encode_episode(record, {}))
            await journal.put(f"{id}/score/s", {"score": math.nan, "error": None, "reasoning": None})
        found = [*outlines(journal, "eval/", "s")]
    assert sorted(each.id for each in found) == ids
    assert all([*each.scores] == ["s"] for each in found)
