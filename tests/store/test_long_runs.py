"""The phases of a run in order, the entries of a long history, and records that are cancelled or fail."""

from __future__ import annotations

import asyncio
import random

import pytest

from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import RequestError, StoreError
from etude.core.records import RunEnded
from etude.rollout.collections import collection_phase, phase_name
from etude.store.episodes import choose_phase, encode_episode, list_phases, phase_epoch
from etude.store.journal import Journal
from etude.store.log import ModelLog
from tests.show.histories import history
from tests.support import until

EPOCHS = 300


async def test_a_record_whose_task_is_cancelled_is_in_the_journal_and_in_the_state(journal):
    log = ModelLog(journal)
    adding = asyncio.create_task(log.add(RunEnded()))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    await until(lambda: log.state.end is not None)
    assert ModelLog(journal).state.end == log.state.end


async def test_a_record_that_cannot_be_written_changes_nothing(journal):
    log = ModelLog(journal)
    journal.close()
    for add in (log.add, log.add_soon):
        with pytest.raises(StoreError):
            await add(RunEnded())
    assert log.state.end is None


def test_an_entry_of_a_history_is_found_by_its_epoch():
    whole = history([0.5] * EPOCHS, {0: 0.1, 100: 0.2, 200: 0.3})
    assert whole.epoch(1) is whole.epochs[0] and whole.epoch(EPOCHS) is whole.epochs[-1]
    assert whole.epoch(0) is None and whole.epoch(EPOCHS + 1) is None
    assert whole.validation(100) is whole.validations[1] and whole.validation(101) is None
    past = whole.until(100)
    assert [len(past.epochs), len(past.validations)] == [100, 2]
    assert whole.until(0).epochs == () and len(whole.until(0).validations) == 1
    assert history([]).epoch(1) is None


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
async def phases_journal(tmp_path):
    """Has an episode of each phase, put there in no order."""
    phases = random.Random(0).sample(LATEST_FIRST, len(LATEST_FIRST))
    with Journal(tmp_path / "run.db") as phases_journal:
        for phase in phases:
            record = EpisodeRecord(id=f"{phase}/e/0", example=Example("e", {}), generation=0)
            await phases_journal.put(record.id, encode_episode(record, {}))
        yield phases_journal


async def test_the_phases_come_latest_first(phases_journal):
    assert list_phases(phases_journal) == LATEST_FIRST


async def test_the_latest_is_chosen_unless_another_is_wished_for(phases_journal):
    assert choose_phase(phases_journal, None) == "eval"
    assert choose_phase(phases_journal, "train/3.2") == "train/3.2"
    with pytest.raises(RequestError, match="no episodes of the phase 'train/4'"):
        choose_phase(phases_journal, "train/4")


@pytest.mark.parametrize(
    ("phase", "epoch"),
    [("train/4", 3), ("train/4.2", 3), ("train/4-k2.2", 3), ("validation/3", None), ("eval", None)],
)
def test_the_epoch_that_a_phase_was_collected_for(phase, epoch):
    assert phase_epoch(phase) == epoch


def test_a_label_with_a_dot_is_not_taken_for_a_number():
    assert phase_name("train", 3, "k.2") != collection_phase(phase_name("train", 3, "k"), 2)
