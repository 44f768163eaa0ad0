"""A run in which alarms ring, with any trainer, also when it is killed and resumed."""

import json

import pytest

from etude.core.history import EpochEntry
from etude.loop.alarms import Alarm
from etude.store.figures import Summary, summary_in
from etude.store.histories import read_histories
from tests import guide_parts as guide
from tests.several import Several, config
from tests.support import one_quick
from tests.training import Interrupted, Run, Watcher

OF_AN_EPOCH = 12


class AtEpochs(Alarm, name="rings_at_epochs_for_tests"):
    """Rings in the epochs that it is told."""

    at: list[int]

    def look(self, entry, earlier):
        if not isinstance(entry, EpochEntry):
            return None
        return "this epoch is not to be trusted" if entry.epoch in self.at else ""


@pytest.fixture(params=one_quick("guide", "epochs", "one loop"))
def run(tmp_path, request) -> Run:
    """A run of our trainer, or of one that implements only the interface."""
    made = Run(tmp_path / "run")
    made.make_trainer = guide.TRAINERS[request.param]
    return made


def alarm(action: str, *at: int) -> dict[str, Alarm]:
    return {"mine": AtEpochs(action=action, at=list(at))}


def read_summary(run: Run, num_epochs: int = 4) -> Summary:
    return summary_in(read_histories(run.path), "run", num_epochs)


def epochs_done(run: Run) -> list[int]:
    return [entry.epoch for entry in read_histories(run.path)[None].epochs]


async def test_a_warning_is_told_once_and_is_in_the_journal_the_files_and_the_summary(run):
    run.finetuning.alarms = alarm("warn", 2, 3)
    await run.start(num_epochs=4)
    told = [text for text in run.watcher.warnings if "trusted" in text]
    assert told == ["epoch 2: this epoch is not to be trusted"]
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    held = [[(each["alarm"], each["is_new"]) for each in line.get("alarms", [])] for line in lines]
    assert held == [[], [("mine", True)], [("mine", False)], []]
    assert {"answer_tokens", "sampled_entropy"} <= lines[0].keys()
    warnings = [text for text in read_summary(run).warnings if "trusted" in text]
    assert warnings == ["epoch 3 (and 1 more): this epoch is not to be trusted"]
    resumed = run.restart()
    await resumed.start(num_epochs=5)
    assert not any("trusted" in text for text in resumed.watcher.warnings)


async def test_stop_ends_the_run_early_with_the_reason_also_when_it_is_resumed(run):
    run.finetuning.alarms = alarm("stop", 2)
    await run.start(num_epochs=4)
    assert epochs_done(run) == [1, 2]
    assert len(run.engine.requests) == 2 * OF_AN_EPOCH
    assert read_summary(run).stopped == "epoch 2: this epoch is not to be trusted"
    assert any(text.startswith("stopped after epoch 2: epoch 2: this") for text in run.watcher.events)
    resumed = run.restart()
    await resumed.start(num_epochs=4)
    assert resumed.engine.requests == [] and epochs_done(run) == [1, 2]


async def test_an_alarm_in_the_last_epoch_stops_nothing_early_until_the_run_is_to_last_longer(run):
    run.finetuning.alarms = alarm("stop", 2)
    await run.start(num_epochs=2)
    assert read_summary(run, 2).stopped is None
    assert not any("stopped after" in text for text in run.watcher.events)
    resumed = run.restart()
    await resumed.start(num_epochs=4)
    said = "epoch 2: this epoch is not to be trusted"
    assert read_summary(run).stopped == said
    assert f"stopped after epoch 2: {said}" in resumed.watcher.events


class Killed(Watcher):
    """Ends the process when an alarm rings, before anything is done about it."""

    def alarm(self, facts):
        if "trusted" in facts["text"]:
            raise Interrupted


async def test_a_stop_that_a_kill_came_before_ends_the_run_when_it_is_resumed(run):
    run.finetuning.alarms = alarm("stop", 2)
    run.watcher = Killed()
    with pytest.raises(Interrupted):
        await run.start(num_epochs=4)
    await run.restart().start(num_epochs=4)
    assert epochs_done(run) == [1, 2]
    assert read_summary(run).stopped == "epoch 2: this epoch is not to be trusted"


async def test_an_alarm_of_one_target_ends_the_run_of_all_and_says_whose_it_is(tmp_path):
    class OfTheProver(AtEpochs, name="rings_for_one_target_in_tests"):
        def look(self, entry, earlier):
            return super().look(entry, earlier) if entry.metrics.get("target") == "prover" else ""

    several = Several(tmp_path / "run")
    settings = config(num_epochs=4)
    settings.finetuning.alarms = {"mine": OfTheProver(action="stop", at=[2])}
    outcome = await several.start(settings)
    assert outcome.summary["epochs_trained"] == 2
    assert outcome.summary["stopped"] == "prover: epoch 2: this epoch is not to be trusted"
    assert "prover: epoch 2: this epoch is not to be trusted" in several.watcher.warnings
