"""The epoch trainer with a real journal, collector, evaluation run and builder."""

import asyncio
import json
from dataclasses import replace

import pytest

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import NO_ADVANTAGE, Grpo
from etude.backends.trainer_adapter import EVERY_KIND, Capabilities
from etude.config.finetuning import CurriculumLearningConfig, FinetuneRunConfig
from etude.core.errors import JobStillRunning, RequestError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.loop.trainer import EpochTrainer, EpochTrainerConfig
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, Interrupted, examples, interrupt, version


async def test_log_progress_writes_metrics_and_rewards_to_another_folder(run, tmp_path):
    (await run.start(num_epochs=2)).log_progress(1, {}, str(tmp_path / "logs"))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "training_metrics.jsonl").open()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert {"timestamp", "run_id", "avg_reward", "num_trajectories", "num_groups"} <= lines[0].keys()
    assert len(json.loads((tmp_path / "logs" / "reward_history.json").read_text())) == 2


async def test_validation_comes_before_training_at_every_interval_and_at_the_end(run):
    run.validation = examples(10, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=2)
    trainer = await run.start(num_epochs=5)
    assert [event for event in run.watcher.events if event.split()[0] in ("validated", "trained")] == [
        *("validated 0", "trained 1", "trained 2", "validated 2"),
        *("trained 3", "trained 4", "validated 4", "trained 5", "validated 5"),
    ]
    assert [entry.version.number for entry in trainer.history.validations] == [0, 2, 4, 5]
    metrics = trainer.history.validations[0].metrics
    assert (metrics["num_examples"], metrics["dataset_type"]) == (10, "validation")
    assert 0 <= metrics["min_reward"] <= metrics["avg_reward"] <= metrics["max_reward"] <= 1


@pytest.mark.parametrize("status", [TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED])
async def test_a_failed_job_ends_the_run_and_a_resumed_run_submits_it_as_another_job(run, status):
    ended = {"status": status, "message": "out of memory"}
    run.adapter.behave = lambda found: found.model_copy(update=ended)
    with pytest.raises(TrainingError, match=f"run-epoch-1 .* ended as '{status}': out of memory"):
        await run.start()
    again = run.restart()
    await again.start()
    assert again.adapter.submitted[0] == "run-epoch-1-retry-1"
    assert len([key for key in again.engine.requests if key.conversation.startswith("train/1/")]) == 0


async def test_a_stuck_job_is_an_error_and_is_cancelled(run):
    run.settings = {"job_timeout": 0.05}
    run.adapter.behave = lambda found: asyncio.sleep(60)
    with pytest.raises(TrainingError, match=r" 0\.05 s .*cancelled.*job_timeout"):
        await run.start()
    assert run.adapter.cancelled == ["run-epoch-1"]


async def test_a_stuck_job_that_cannot_be_cancelled_is_not_made_a_second_time(run, monkeypatch):
    run.settings = {"job_timeout": 0.05}
    run.adapter.cancels = False
    run.adapter.slow = {"run-epoch-1"}
    run.adapter.behave = lambda found: asyncio.sleep(60)
    monkeypatch.setattr("etude.groups.model_jobs._LOOKS", 1)
    with pytest.raises(JobStillRunning, match=r"but reports 'running'"):
        await run.start()
    again = run.restart()
    await again.start(num_epochs=1)
    assert again.adapter.submitted == []
    assert (again.engine.version, len(again.statuses)) == (1, 1)


async def test_weights_that_have_not_changed_are_an_error(run):
    same = version(1).model_copy(update={"digest": version(0).digest})
    run.adapter.behave = lambda found: found.model_copy(update={"version": same})
    with pytest.raises(TrainingError, match=f"weights .*digest {same.digest}"):
        await run.start()


async def test_an_engine_that_goes_on_with_the_old_weights_is_an_error(run):
    async def ignore(version):
        pass

    run.engine.adopt = ignore
    with pytest.raises(TrainingError, match="version 0 after adopting version 1"):
        await run.start()


async def test_an_engine_that_answers_with_other_weights_than_it_says_is_an_error(run):
    class Stale(ScriptedEngine):
        async def complete(self, request):
            return replace(await super().complete(request), model_version=0)

    run.engine = Stale(lambda request: ["yes", "no"][request.key % 2])
    with pytest.raises(TrainingError, match=r"epoch 2 .*version 1,.*12 from version 0"):
        await run.start()


async def test_a_backend_without_versions_trains_with_a_warning(run, tmp_path):
    run.adapter = FakeAdapter(
        tmp_path / "backend",
        capabilities=Capabilities(),
        behave=lambda found: found.model_copy(update={"version": None}),
    )
    await run.start(num_epochs=1)
    assert len(run.statuses) == 1
    assert "Etude cannot check" in run.watcher.warnings[0]


async def test_a_run_that_trained_on_nothing_fails(run):
    run.engine = ScriptedEngine(lambda request: "no")
    with pytest.raises(TrainingError, match=rf"nothing in 2 epochs.*3 × {NO_ADVANTAGE}"):
        await run.start(num_epochs=2)
    assert len([event for event in run.watcher.events if event.startswith("skipped")]) == 2
    assert run.adapter.submitted == []


async def test_an_epoch_without_anything_to_train_on_is_skipped_shown_and_counted(run):
    def answer(request):
        return "no" if request.conversation.startswith("train/1/") else ["yes", "no"][request.key % 2]

    run.engine = ScriptedEngine(answer)
    trainer = await run.start(num_epochs=2)
    assert [bool(entry.skipped) for entry in trainer.history.epochs] == [True, False]
    assert (await trainer.get_metrics("run"))["epochs_skipped"] == 1
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    assert NO_ADVANTAGE in lines[0]["skipped"]
    assert len(run.statuses) == 1


async def test_groups_of_one_are_refused_before_anything_is_sampled(run):
    run.builder = CollectingBuilder(Grpo(num_generations=1))
    with pytest.raises(RequestError, match="groups of one"):
        await run.start()
    assert run.engine.requests == []


class TextOnly(ScriptedEngine):
    """Does not tell tokens, as most hosted endpoints."""

    async def complete(self, request):
        told = await super().complete(request)
        return replace(told, prompt_ids=None, completion_ids=None, logprobs=None)


async def test_missing_token_ids_stop_the_run_at_the_first_episode_when_the_backend_needs_them(run, tmp_path):
    run.engine = TextOnly(lambda request: "yes")
    run.examples = examples(50)
    run.adapter = FakeAdapter(tmp_path / "backend", capabilities=Capabilities(token_ids_for=EVERY_KIND))
    with pytest.raises(TrainingError, match="no token ids"):
        await run.start()
    assert len(run.engine.requests) < 50


async def test_text_is_enough_for_a_backend_that_does_not_need_tokens(run):
    run.engine = TextOnly(lambda request: ["yes", "no"][request.key % 2])
    await run.start(num_epochs=1)
    assert len(run.statuses) == 1


async def test_scores_that_fail_within_the_budget_are_excluded_and_counted(run):
    def picky(example, output):
        return float("nan") if example.id == "e0" else float(output == "yes")

    run.evaluator = picky
    run.finetuning.error_budget = 0.5
    metrics = (await run.start(num_epochs=1)).history.epochs[0].metrics
    assert (metrics["episodes"], metrics["unscored"]) == (12, 4)
    assert metrics["failures"] == {"score:correct": 4}


async def test_the_curriculum_filters_and_its_state_survives_a_restart(run):
    run.examples = examples(20)
    run.finetuning.curriculum_learning = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.25, increment_percentile=0.25, expansion_interval=1
    )
    await run.start(num_epochs=2)
    trainer = await run.restart().start(num_epochs=4)
    shares = [entry.metrics["curriculum_percentile"] for entry in trainer.history.epochs]
    assert shares == [0.25, 0.5, 0.75, 1.0]
    first = trainer.history.epochs[0].metrics
    assert first["filtered_groups"] < first["num_groups"]
    state = json.loads((run.path / "curriculum_state.json").read_text())
    assert (state["current_percentile"], state["last_expansion_epoch"]) == (1.0, 3)
    assert state["config"]["expansion_interval"] == 1


async def test_included_groups_are_a_set_in_python_and_a_list_in_the_files(run):
    class Remembers(EpochTrainer):
        def apply_curriculum_learning(self, trajectory_collection, epoch):
            self._curriculum_state["included_groups"].add(f"epoch {epoch}")
            self._curriculum_state["included_groups"].update({"all"})
            return trajectory_collection

    run.make_trainer = lambda: Remembers(EpochTrainerConfig())
    run.finetuning.curriculum_learning.enabled = True
    await run.start(num_epochs=1)
    trainer = await run.restart().start(num_epochs=2)
    assert trainer._curriculum_state["included_groups"] == {"all", "epoch 0", "epoch 1"}
    assert trainer.get_curriculum_state()["included_groups"] == ["all", "epoch 0", "epoch 1"]
    state = json.loads((run.path / "curriculum_state.json").read_text())
    assert state["included_groups"] == ["all", "epoch 0", "epoch 1"]


async def test_a_run_stops_early_when_the_target_is_reached(run):
    run.settings = {"target_reward": 0.55}
    run.validation = examples(40, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=1)
    trainer = await run.start(num_epochs=9)
    assert trainer.history.validations[-1].metrics["avg_reward"] >= 0.55
    assert len(trainer.history.epochs) < 9
    assert any("reached the target" in event for event in run.watcher.events)


async def test_only_the_best_versions_and_the_last_one_are_kept(run):
    run.settings = {"keep_checkpoints": 1}
    run.validation = examples(60, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=1)
    run.engine = ScriptedEngine(
        lambda request: "yes" if request.key % 100 < {0: 30, 1: 70}.get(run.engine.version, 40) else "no"
    )
    trainer = await run.start(num_epochs=3)
    assert run.adapter.kept == [1, 3]
    assert (await trainer.get_metrics("run"))["best_version"]["number"] == 1


async def test_a_run_that_was_killed_before_it_deleted_the_last_epochs_versions_does_so(run):
    run.settings = {"keep_checkpoints": 1}
    run.adapter.prune = interrupt
    with pytest.raises(Interrupted):
        await run.start(num_epochs=1)
    again = run.restart()
    assert again.adapter.kept == []
    await again.start(num_epochs=1)
    assert again.adapter.kept == [0, 1]


async def test_starting_a_collection_twice_or_finishing_one_that_was_not_started_is_an_error(run):
    trainer = await run.start(num_epochs=1)
    builder = trainer.trajectory_builder
    with pytest.raises(ValueError, match="run_id: x"):
        await builder.finalize("x")
    builder.evaluation_runs["x"] = waiting = asyncio.create_task(asyncio.sleep(600))
    with pytest.raises(ValueError, match=r"Run x .*in progress"):
        await builder.start_run("x")
    await trainer.cleanup()
    assert waiting.cancelled() and builder.evaluation_runs == {}
