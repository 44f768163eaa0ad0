"""Of the versions of a run those that are kept and the best one; and its warnings, as they were recorded."""

import asyncio

import pytest

from etude.core.errors import StoreError
from etude.core.history import AlarmEvent, History
from etude.core.records import RunEnded
from etude.store.figures import (
    alarm_sentences,
    best_version,
    causes_in,
    last_version,
    stopped_by,
    versions_to_keep,
)
from etude.store.journal import ModelLog
from tests.show.histories import epoch, history, validation
from tests.support import until


def numbers(versions):
    return [one.number for one in versions]


def test_the_best_versions_by_validation_and_the_last_one_are_kept():
    past = history([0.0] * 4, {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.8, 4: 0.2})
    assert numbers(versions_to_keep(past, 1)) == [1, 4]
    assert numbers(versions_to_keep(past, 2)) == [1, 3, 4]


def test_without_validation_the_rewards_of_the_episodes_sampled_from_a_version_count():
    assert numbers(versions_to_keep(history([0.1, 0.9, 0.2]), 1)) == [1, 3]


def test_a_version_that_was_measured_twice_is_one_version():
    past = History(run_id="run", epochs=(epoch(0, 0.5, skipped="flat"), epoch(0, 0.6)))
    assert numbers(versions_to_keep(past, 5)) == [0, 1]


def test_the_best_version_has_the_highest_validation_reward_and_the_latest_wins_ties():
    assert best_version(history([0.0] * 3, {0: 0.1, 1: 0.9, 2: 0.9, 3: 0.2})).number == 2


def test_what_was_not_measured_after_training_is_not_called_best():
    assert best_version(history([0.9, 0.1])) is None
    assert best_version(history([0.9, 0.1], {0: 0.5})) is None
    assert best_version(history([])) is last_version(history([])) is None
    assert versions_to_keep(history([]), 3) == []


def event(alarm, text, *, of="", is_new=True, action="warn"):
    return AlarmEvent(alarm=alarm, of=of, is_new=is_new, action=action, text=text)


def with_alarms(entry, *events):
    return entry.model_copy(update={"alarms": events})


COLLAPSE, FLAT = event("reward_collapse", "the reward has collapsed"), event("equal_groups", "all are equal")


def test_an_alarm_is_a_sentence_about_the_last_entry_it_held_for():
    entries = [with_alarms(epoch(0, 1.0), FLAT), with_alarms(epoch(1, 1.0), FLAT), epoch(2, 1.0)]
    assert alarm_sentences(History(run_id="r", epochs=entries)) == ["epoch 2 (and 1 more): all are equal"]
    validations = [with_alarms(validation(number, 0.0), COLLAPSE) for number in range(3)]
    assert alarm_sentences(History(run_id="r", epochs=entries[1:], validations=validations)) == [
        "epoch 2: all are equal",
        "validation after epoch 2 (and 2 more): the reward has collapsed",
    ]


def test_alarms_about_several_things_are_told_apart_and_failures_are_shown_elsewhere():
    held = [event("mine", name, of=name) for name in ("judge", "correct")]
    entry = with_alarms(epoch(0, 1.0), *held, event("failures", "2 episodes failed"))
    assert alarm_sentences(History(run_id="r", epochs=[entry])) == ["epoch 1: judge", "epoch 1: correct"]


def test_a_run_that_an_alarm_ended_did_nothing_after_it():
    stop = event("mismatch", "they differ", action="stop")
    ended = History(run_id="r", epochs=(epoch(0, 0.4), with_alarms(epoch(1, 0.0), stop)))
    assert stopped_by(ended, 3) == "epoch 2: they differ"
    assert stopped_by(History(run_id="r", epochs=(*ended.epochs, epoch(2, 0.5))), 3) is None
    assert stopped_by(History(run_id="r"), 3) is None
    assert alarm_sentences(history([0.1, 0.5], {0: 0.1, 2: 0.6})) == []


def cause(reason, count=3, kind="call_failed", episode="train/1/a/1"):
    return {"kind": kind, "reason": reason, "count": count, "episode": episode}


def test_causes_are_added_up_over_epochs():
    entries = [
        epoch(0, 0.5, failure_causes=[cause("took longer than 30 s", 2)]),
        epoch(1, 0.5, failure_causes=[cause("took longer than 31 s", 5), cause("oops", 1)]),
    ]
    first, second = causes_in(entries)
    assert (first.count, first.reason, first.episode) == (7, "took longer than 30 s", "train/1/a/1")
    assert second.count == 1


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
    whole = history([0.5] * 300, {0: 0.1, 100: 0.2, 200: 0.3})
    assert whole.epoch(1) is whole.epochs[0] and whole.epoch(300) is whole.epochs[-1]
    assert whole.epoch(0) is None and whole.epoch(300 + 1) is None
    assert whole.validation(100) is whole.validations[1] and whole.validation(101) is None
    past = whole.until(100)
    assert [len(past.epochs), len(past.validations)] == [100, 2]
    assert whole.until(0).epochs == () and len(whole.until(0).validations) == 1
    assert history([]).epoch(1) is None
