"""The phases of a run, in order."""

from __future__ import annotations

import random

import pytest

from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import RequestError
from etude.rewards.collections import numbered, phase_name
from etude.store.encode import encode_episode
from etude.store.episodes import choose_phase, epoch_of, phases_of
from etude.store.journal import Journal

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
async def journal(tmp_path):
    """Has an episode of each phase, put there in no order."""
    phases = random.Random(0).sample(LATEST_FIRST, len(LATEST_FIRST))
    with Journal(tmp_path / "run.db") as journal:
        for phase in phases:
            record = EpisodeRecord(id=f"{phase}/e/0", example=Example("e", {}), generation=0)
            await journal.put(record.id, encode_episode(record, {}))
        yield journal


async def test_the_phases_come_latest_first(journal):
    assert phases_of(journal) == LATEST_FIRST


async def test_the_latest_is_chosen_unless_another_is_wished_for(journal):
    assert choose_phase(journal, None) == "eval"
    assert choose_phase(journal, "train/3.2") == "train/3.2"
    with pytest.raises(RequestError, match="no episodes of the phase 'train/4'"):
        choose_phase(journal, "train/4")


@pytest.mark.parametrize(
    ("phase", "epoch"),
    [("train/4", 3), ("train/4.2", 3), ("train/4-k2.2", 3), ("validation/3", None), ("eval", None)],
)
def test_the_epoch_that_a_phase_was_collected_for(phase, epoch):
    assert epoch_of(phase) == epoch


def test_a_label_with_a_dot_is_not_taken_for_a_number():
    assert phase_name("train", 3, "k.2") != numbered(phase_name("train", 3, "k"), 2)
