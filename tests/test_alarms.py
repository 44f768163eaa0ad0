"""A run in which alarms ring, with any trainer, also when it is killed and resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.backends.capabilities import Capabilities
from etude.core.errors import RunPaused
from etude.core.history import EpochEntry
from etude.loop.alarms import Alarm
from etude.store.figures import Summary, summary_in
from etude.store.log import read_histories, read_states
from etude.store.run_folder import RunFolder
from tests import guide_parts as guide
from tests.several import Several, config
from tests.support import ScriptedEngine, kept_in, one_quick
from tests.training import FakeAdapter, Interrupted, Run, Watcher

GOING_BACK = Capabilities(versions=True, from_base=True)
OF_AN_EPOCH = 12


class AtEpochs(Alarm, name="rings_at_epochs_for_tests"):
    """Rings in the epochs that it is told."""

    at: list[int]

    def look(self, entry, earlier):
        if not isinstance(entry, EpochEntry):
            return None
        return "this epoch is not to be trusted" if entry.epoch in self.at else ""


class ReturningAdapter(FakeAdapter):
    """Numbers versions as it is told to, and can go back to any."""

    counted = 0

    async def count_from(self, number):
        self.counted = number

    async def submit(self, trajectories):
        own, self._version = (
            self._version,
            self._version.model_copy(update={"number": max(self._version.number, self.counted)}),
        )
        try:
            return await super().submit(trajectories)
        finally:
            self._version = own


def make_adapter(run: Run) -> ReturningAdapter:
    return ReturningAdapter(run.path.parent / "backend", capabilities=GOING_BACK)


@pytest.fixture(params=one_quick("guide", "epochs", "one loop"))
def run(tmp_path, request) -> Run:
    """A run of our trainer, or of one that implements only the interface."""
    made = Run(tmp_path / "run")
    made.adapter = make_adapter(made)
    made.engine = engine()
    if request.param != "epochs":
        kind = guide.GuideTrainer if request.param == "guide" else guide.OneLoopTrainer
        made.make_trainer = lambda: kind(guide.GuideTrainerConfig())
    return made


def engine() -> ScriptedEngine:
    """v1 is the best of the first versions."""
    chance = {0: 40, 1: 70, 2: 30, 3: 30}

    def answer(request):
        return "yes" if request.key % 100 < chance.get(made.version, 60) else "no"

    made = ScriptedEngine(answer)
    return made


def again(run: Run) -> Run:
    """The run in a new process."""
    resumed = run.restarted()
    resumed.adapter, resumed.engine, resumed.make_trainer = make_adapter(run), engine(), run.make_trainer
    return resumed


def alarm(action: str, *at: int) -> dict[str, Alarm]:
    return {"mine": AtEpochs(action=action, at=list(at))}


def read_history(run: Run) -> Any:
    with RunFolder.read(run.path) as folder:
        return read_histories(folder.journal)[None]


def read_summary(run: Run, num_epochs: int = 4) -> Summary:
    with RunFolder.read(run.path) as folder:
        return summary_in(read_histories(folder.journal), "run", num_epochs)


def epochs_done(run: Run) -> list[int]:
    return [entry.epoch for entry in read_history(run).epochs]


def everything(run: Run) -> dict[str, Any]:
    with RunFolder.read(run.path) as folder:
        return kept_in(folder.journal)


async def test_a_warning_is_told_once_and_is_in_the_journal_the_files_and_the_summary(run):
    run.finetuning.alarms = alarm("warn", 2, 3)
    await run.start(num_epochs=4)
    told = [text for text in run.watcher.warnings if "trusted" in text]
    assert told == ["epoch 2: this epoch is not to be trusted"]
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    held = [
        [(each["alarm"], each["is_new"], each["since"]) for each in line.get("alarms", [])] for line in lines
    ]
    assert held == [[], [("mine", True, 2)], [("mine", False, 2)], []]
    assert {"answer_tokens", "sampled_entropy"} <= lines[0].keys()
    warnings = [text for text in read_summary(run).warnings if "trusted" in text]
    assert warnings == ["epoch 3 (and 1 other): this epoch is not to be trusted, since epoch 2"]
    resumed = again(run)
    await resumed.start(num_epochs=5)
    assert not any("trusted" in text for text in resumed.watcher.warnings)


async def test_stop_ends_the_run_early_with_the_reason_also_when_it_is_resumed(run):
    run.finetuning.alarms = alarm("stop", 2)
    await run.start(num_epochs=4)
    assert epochs_done(run) == [1, 2]
    assert len(run.engine.requests) == 2 * OF_AN_EPOCH
    assert read_summary(run).stopped == "epoch 2: this epoch is not to be trusted"
    assert any(text.startswith("stopped after epoch 2: epoch 2: this") for text in run.watcher.events)
    resumed = again(run)
    await resumed.start(num_epochs=4)
    assert resumed.engine.requests == [] and epochs_done(run) == [1, 2]


async def test_an_alarm_in_the_last_epoch_stops_nothing_early_until_the_run_is_to_last_longer(run):
    run.finetuning.alarms = alarm("stop", 2)
    await run.start(num_epochs=2)
    assert read_summary(run, 2).stopped is None
    assert not any("stopped after" in text for text in run.watcher.events)
    resumed = again(run)
    await resumed.start(num_epochs=4)
    said = "epoch 2: this epoch is not to be trusted"
    assert read_summary(run).stopped == said
    assert f"stopped after epoch 2: {said}" in resumed.watcher.events


async def test_pause_ends_the_process_once_and_the_run_goes_on_when_it_is_resumed(run):
    run.finetuning.alarms = alarm("pause", 2, 3)
    with pytest.raises(RunPaused, match="epoch 2: this epoch is not to be trusted") as paused:
        await run.start(num_epochs=4)
    assert paused.value.override == "finetuning.alarms.mine.action=off"
    assert epochs_done(run) == [1, 2] and len(run.engine.requests) == 2 * OF_AN_EPOCH
    resumed = again(run)
    await resumed.start(num_epochs=4)
    assert epochs_done(run) == [1, 2, 3, 4]
    assert len(resumed.engine.requests) == 2 * OF_AN_EPOCH


class Killed(Watcher):
    """Ends the process when an alarm rings, before anything is done about it."""

    def alarm(self, facts):
        if "trusted" in facts["text"]:
            raise Interrupted


async def killed_when_it_rings(run: Run, num_epochs: int = 4) -> Run:
    run.watcher = Killed()
    with pytest.raises(Interrupted):
        await run.start(num_epochs=num_epochs)
    return again(run)


def check_way_back(run: Run) -> None:
    """After epoch 3 the run went back to v1, and made versions with new numbers from there."""
    epochs = read_history(run).epochs
    assert [entry.sampled_from.number for entry in epochs] == [0, 1, 2, 1, 4]
    assert [entry.version.number for entry in epochs] == [1, 2, 3, 4, 5]
    assert [entry.back_to and entry.back_to.number for entry in epochs] == [None, None, 1, None, None]
    with RunFolder.read(run.path) as folder:
        versions = read_states(folder.journal)[None].versions
    assert [entry.data.parent for entry in versions.values()] == [0, 1, 2, 1, 4]


async def test_rollback_goes_back_to_the_best_version_and_on_from_there(run):
    run.finetuning.alarms = alarm("rollback", 3)
    await run.start(num_epochs=5)
    check_way_back(run)
    assert "the run has gone back to v1, and continues from there" in run.watcher.warnings
    line = json.loads((run.path / "training_metrics.jsonl").read_text().splitlines()[2])
    assert line["back_to"] == 1


async def test_a_rollback_that_a_kill_came_before_ends_as_one_that_none_came_before(run):
    run.finetuning.alarms = alarm("rollback", 3)
    resumed = await killed_when_it_rings(run, num_epochs=5)
    await resumed.start(num_epochs=5)
    check_way_back(run)
    assert resumed.engine.version == 5
    assert len(run.engine.requests) + len(resumed.engine.requests) == 5 * OF_AN_EPOCH


def ahead(run: Run) -> Run:
    run.finetuning = run.finetuning.model_copy(update={"collect_ahead": True, "deterministic": True})
    run.finetuning.alarms = alarm("rollback", 3)
    run.make_trainer = None
    return run


@pytest.mark.parametrize("run", ["epochs"], indirect=True)
async def test_what_was_collected_ahead_of_a_rollback_is_collected_again(run, tmp_path):
    await ahead(run).start(num_epochs=5)
    epochs = read_history(run).epochs
    # The fourth epoch's episodes were collected from v2 while v3 was made.
    assert epochs[2].back_to.number == 1
    assert epochs[3].sampled_from.number == 1 and epochs[3].metrics["model_versions"] == {"1": OF_AN_EPOCH}
    assert len(run.engine.requests) == 6 * OF_AN_EPOCH
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other" / "run")
    other.adapter, other.engine = make_adapter(other), engine()
    resumed = await killed_when_it_rings(ahead(other), num_epochs=5)
    await resumed.start(num_epochs=5)
    assert everything(other) == everything(run)


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
