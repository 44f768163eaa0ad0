"""The words that filter episodes, and the phases of a run in order."""

import math
import random

import pytest

from etude.core.episode import EpisodeRecord, Example, Failure
from etude.core.errors import RequestError
from etude.rollout.phases import collection_phase, phase_name
from etude.store.episodes import choose_phase, encode_episode, list_phases, phase_stage
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, find_episodes, outlines, parse_query


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
        ("reward:1", {"reward": 1.0}, {"reward": 0.0}),
        ("apples", {"said": [{"content": "Twelve APPLES"}]}, {"said": [{"content": "pears"}]}),
        ('"twelve apples"', {"said": [["Twelve apples"]]}, {"said": [["apples, twelve"]]}),
        ("text:é", {"said": [["café"]]}, {"said": [["cafe"]]}),
        ("assistant", {"said": [["an assistant"]]}, {"said": [{"role": "assistant"}]}),
    ],
)
def test_words(words, fits, not_):
    query = parse_query(words)
    assert query.fits(outline(**fits)) and not query.fits(outline(**not_))


@pytest.mark.parametrize(
    "words", ["reward<", "reward<x", "reward < 0", "version:v3", "agent=solver", 'an "open', "failed:tiemout"]
)
def test_what_cannot_be_meant_is_refused(words):
    with pytest.raises(RequestError):
        parse_query(words)


def test_no_words_fit_everything():
    assert parse_query("  ").fits(outline())


LATEST_FIRST = [
    "eval",
    "validation/10",
    "validation/2",
    "train/11",
    "train/3.10",
    "train/3.2",
    "train/3",
    "train/3-k2.2",
    "train/3-k2",
    "train/1",
]


@pytest.fixture
async def phases(journal):
    """A journal with an episode of each phase, put there in no order."""
    for phase in random.Random(0).sample(LATEST_FIRST, len(LATEST_FIRST)):
        record = EpisodeRecord(id=f"{phase}/e/0", example=Example("e", {}), generation=0)
        await journal.put(record.id, encode_episode(record, {}))
    return journal


async def test_phases_come_latest_first_and_the_first_is_chosen_unless_another_is_wished_for(phases):
    assert list_phases(phases) == LATEST_FIRST
    assert choose_phase(phases, None) == "eval"
    assert choose_phase(phases, "train/3.2") == "train/3.2"
    with pytest.raises(RequestError, match=f"phase 'train/4'; .*: {', '.join(LATEST_FIRST)}"):
        choose_phase(phases, "train/4")


def test_what_a_phase_was_collected_for():
    stages = dict.fromkeys(("train/4", "train/4.2", "train/4-k2.2/example/0"), ("train", 4))
    stages |= {"validation/3": ("validation", 3), "train/4b": None, "eval": None}
    assert {name: phase_stage(name) for name in stages} == stages


def test_a_label_with_a_dot_is_not_taken_for_a_number():
    assert phase_name("train", 3, "k.2") != collection_phase(phase_name("train", 3, "k"), 2)


async def test_episodes_are_found_from_phase_to_phase(phases):
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
        for words in ("typo<5", "-sz<5"):
            with pytest.raises(RequestError, match=r"6 episodes .*score"):
                find_episodes(journal, ["eval"], "s", parse_query(words))
            # The rest alone does not tell: an earlier episode may have the score.
            rest = find_episodes(journal, ["eval"], "s", parse_query(words), after=ids[3])
            assert rest.phase is None and rest.looked_at == 2
        assert len(find_episodes(journal, ["eval"], "s", parse_query("-s<5")).episodes) == 6
    assert sorted(each.id for each in found) == ids
    assert all([*each.scores] == ["s"] for each in found)
