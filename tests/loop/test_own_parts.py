"""Parts that users wrote: fresh episodes, checked data, journalled epochs, nothing done twice."""

import itertools
import json
from collections import Counter
from datetime import date
from typing import Any

import numpy as np
import pytest

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from etude.core.errors import RequestError, RunStopped, TrainingError
from etude.core.job import TrainingJobStatus, TrainingStatusEnum
from etude.loop.bookkeeper import Bookkeeper
from etude.loop.trainer import EpochTrainer, EpochTrainerConfig
from etude.store.facts import read_facts
from etude.store.histories import read_histories, read_jobs
from etude.store.run_folder import RunFolder
from tests import guide_parts as guide
from tests.loop.test_alarm_actions import alarm
from tests.support import one_quick, read_summary, without_times
from tests.training import FakeAdapter, Interrupted, Run, examples, interrupt, play

BUILDERS = {
    "grpo": lambda: CollectingBuilder(Grpo(num_generations=4)),
    "guide": lambda: guide.GuideBuilder(guide.GuideBuilderConfig()),
    "own phase": lambda: guide.OwnPhaseBuilder(guide.GuideBuilderConfig()),
    "caching": lambda: guide.CachingBuilder(guide.GuideBuilderConfig()),
    "replaying": lambda: guide.ReplayingBuilder(guide.GuideBuilderConfig()),
}
OTHERS = [name for name in guide.TRAINERS if name != "guide"]
STALE = {"caching", "replaying"}
OWN_TRAINERS = ["guide", "one loop", "same epoch"]


def use(run: Run, builder: str, trainer: str | type[guide.GuideTrainer]) -> Run:
    """Parts by name, or a trainer of the test's own."""
    run.builder = BUILDERS[builder]()
    if isinstance(trainer, str):
        run.make_trainer = guide.TRAINERS[trainer]
    else:
        run.make_trainer = lambda: trainer(guide.GuideTrainerConfig())
    return run


@pytest.mark.parametrize(
    ("trainer", "adapter"),
    one_quick(("guide", "versions"), ("guide", "silent"), *((name, "versions") for name in OTHERS)),
)
@pytest.mark.parametrize("builder", BUILDERS)
async def test_every_combination_trains_on_fresh_episodes_or_is_refused(
    run, tmp_path, builder, trainer, adapter
):
    use(run, builder, trainer)
    if adapter == "silent":
        run.adapter = guide.GuideAdapter(guide.GuideAdapterConfig())
    if builder in STALE and adapter == "versions":
        with pytest.raises(TrainingError, match="version"):
            await run.start(num_epochs=3)
        assert run.engine.version == 1
        return
    await run.start(num_epochs=3)
    assert len(run.statuses) == 3
    if builder not in STALE:
        # As many calls as episodes, none of them with a key that was there before.
        keys = [request.key for request in run.engine.requests]
        assert len(keys) == len(set(keys)) == 3 * 4 * len(run.examples)
    if adapter == "versions":
        assert Counter(version for version, _ in run.engine.answered) == {0: 12, 1: 12, 2: 12}
        assert run.engine.version == 3


@pytest.mark.parametrize("trainer", one_quick(*OWN_TRAINERS))
async def test_the_epochs_of_an_own_trainer_are_journalled_reported_and_summed_up(run, trainer):
    run.validation = examples(4, "v")
    made = await use(run, "guide", trainer).start(num_epochs=3)
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert [line["model_version"] for line in lines] == [1, 2, 3]
    assert all(line["filtered_trajectories"] == line["num_trajectories"] == 12 for line in lines)
    assert all(line["episodes"] == 12 and line["reward_low"] < line["avg_reward"] for line in lines)
    if trainer == "guide":
        assert [line["my_figure"] for line in lines] == [0.5, 1.5, 2.5]
        assert made.metrics == [{"my_figure": 0.5}, {"my_figure": 1.5}, {"my_figure": 2.5}]
    summary = read_summary(run.path)
    assert (summary["epochs_trained"], summary["last_version"]["number"]) == (3, 3)
    trained = [event for event in run.watcher.events if event.startswith("trained")]
    assert trained == ["trained 1", "trained 2", "trained 3"]


@pytest.mark.parametrize(
    ("builder", "trainer", "place"),
    one_quick(
        ("guide", "one loop", "following"),
        *(("grpo", "guide", place) for place in ("submitting", "following", "collecting", "ending")),
        ("guide", "guide epochs", "submitting"),
    ),
)
async def test_an_own_trainer_that_is_stopped_is_resumed_to_the_same_end(
    run, tmp_path, builder, trainer, place
):
    (tmp_path / "other").mkdir()
    whole = use(Run(tmp_path / "other" / "run"), builder, trainer)
    await whole.start(num_epochs=3)
    use(run, builder, trainer)
    if place == "following":
        run.adapter.before_status = lambda name: interrupt(name) if name == "run-epoch-2" else None
    elif place == "submitting":
        run.adapter.after_submit = lambda name: interrupt(name) if name == "run-epoch-2" else None
    elif place == "collecting":
        finished = itertools.count(1)
        run.watcher.episode_finished = lambda record: interrupt(record) if next(finished) == 17 else None
    else:
        run.report = lambda history, folder, final: interrupt(folder) if final else None
    with pytest.raises(Interrupted):
        await run.start(num_epochs=3)
    assert read_facts(run.path).state == "unfinished"
    again = use(run.restart(), builder, trainer)
    await again.start(num_epochs=3)
    assert read_facts(run.path).state == "finished"
    assert training_metrics(run) == training_metrics(whole)
    assert len(run.engine.requests) + len(again.engine.requests) == len(whole.engine.requests)
    jobs = [*run.adapter.submitted, *again.adapter.submitted]
    assert sorted(set(jobs)) == whole.adapter.submitted
    # A job whose submission was not acknowledged is asked for again by the same name, and not made twice.
    assert len(jobs) == 4 if place == "submitting" else len(jobs) == 3
    assert again.engine.version == whole.engine.version == 3


@pytest.mark.parametrize("trainer", one_quick("guide", "epochs"))
@pytest.mark.parametrize("lose_jobs", [False, True], ids=["the backend kept the job", "the job was lost"])
async def test_a_run_that_is_stopped_when_an_epoch_is_recorded_does_not_make_its_job_again(
    run, tmp_path, monkeypatch, lose_jobs, trainer
):
    use(run, "guide", trainer)
    monkeypatch.setattr(Bookkeeper, "add", lambda self, entry: interrupt(entry))
    with pytest.raises(Interrupted):
        await run.start(num_epochs=2)
    monkeypatch.undo()
    again = use(run.restart(), "guide", trainer)
    again.adapter = FakeAdapter(tmp_path / "backend", lose_jobs=lose_jobs)
    await again.start(num_epochs=2)
    assert again.adapter.submitted == ["run-epoch-2"]
    assert (again.engine.version, len(again.statuses)) == (2, 2)


def training_metrics(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    return [without_times(line) for line in lines]


async def test_an_own_trainers_error_after_a_stop_is_shown(run):
    class Careless(guide.GuideTrainer):
        async def run(self, num_epochs):
            try:
                return await super().run(num_epochs)
            except RunStopped:
                return [][0]

    run.finetuning.alarms = alarm("stop", 2)
    await use(run, "guide", Careless).start(num_epochs=4)
    (told,) = [text for text in run.watcher.events if "own error" in text]
    assert "IndexError" in told


async def test_a_trainer_that_keeps_its_components_elsewhere_is_held_to_the_same(run):
    class Elsewhere(guide.GuideTrainer):
        async def bind_components(self, trajectory_builder, trainer_adapter):
            self.parts = (trajectory_builder, trainer_adapter)

        async def initialize(self, run_config):
            for part in self.parts:
                await part.initialize(run_config)

        async def run(self, num_epochs):
            builder, adapter = self.parts
            assert isinstance(builder, guide.CachingBuilder) and isinstance(adapter, FakeAdapter)
            builder.config.num_generations = 2
            await builder.start_run("x")
            ref = await adapter.submit(await builder.finalize("x"))
            return [await adapter.wait_until_complete(ref)]

    use(run, "caching", Elsewhere)
    await run.start(num_epochs=1)
    assert run.engine.version == 1
    assert training_metrics(run)[0]["episodes"] == 6


async def test_a_failed_job_of_an_own_trainer_is_submitted_again_by_a_resumed_run(run):
    use(run, "guide", "guide")
    failed = {"status": TrainingStatusEnum.FAILED, "message": "out of memory"}
    run.adapter.behave = lambda found: (
        found.model_copy(update=failed) if found.run_id == "run-epoch-3" else found
    )
    await run.start(num_epochs=3)
    assert [status.status for status in run.statuses] == ["completed", "completed", "failed"]
    assert [job.status for job in read_jobs(run.path)] == ["completed", "completed", "failed"]
    assert read_jobs(run.path)[-1].message == "out of memory"
    again = use(run.restart(), "guide", "guide")
    await again.start(num_epochs=3)
    assert again.adapter.submitted == ["run-epoch-3-retry-1"]
    assert [status.status for status in again.statuses] == ["completed"] * 3
    assert again.engine.requests == []


async def test_a_refusal_that_a_trainer_swallows_fails_the_run_all_the_same(run):
    class Careless(guide.GuideTrainer):
        async def run_epoch(self, epoch, run_id):
            try:
                return await super().run_epoch(epoch, run_id)
            except Exception:  # noqa: BLE001  as trainers do
                return None

        async def run(self, num_epochs):
            statuses = []
            for epoch in range(num_epochs):
                if (ref := await self.run_epoch(epoch, "x")) is not None:
                    statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            return statuses

    use(run, "caching", Careless)
    with pytest.raises(TrainingError, match=r"no episode .*version 1"):
        await run.start(num_epochs=3)
    assert "version 1" in training_metrics(run)[1]["skipped"]


async def test_an_epoch_that_submits_nothing_is_skipped_with_the_reason(run):
    class Lazy(guide.GuideTrainer):
        async def run_epoch(self, epoch, run_id):
            return None if epoch == 1 else await super().run_epoch(epoch, run_id)

        async def run(self, num_epochs):
            refs = [await self.run_epoch(epoch, "x") for epoch in range(num_epochs)]
            return [await self.trainer_adapter.status(ref) for ref in refs if ref is not None]

    use(run, "guide", Lazy)
    run.adapter = guide.GuideAdapter(guide.GuideAdapterConfig())
    await run.start(num_epochs=3)
    assert "run_epoch submitted nothing" in training_metrics(run)[1]["skipped"]


async def test_a_trainer_that_does_not_ask_after_its_job(run):
    # It is an error while the job runs; the weights of one that is over are adopted all the same.
    class Hasty(guide.GuideTrainer):
        async def run(self, num_epochs):
            ref = await self.run_epoch(0, "x")
            return [TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status="completed")]

    use(run, "guide", Hasty)
    run.adapter.slow = {"run-epoch-1"}
    with pytest.raises(TrainingError, match=r"job run-epoch-1 .*'running'"):
        await run.start()
    run.adapter.slow = set()
    await run.start()
    assert [metrics["model_version"] for metrics in training_metrics(run)] == [1]


async def test_several_jobs_of_one_epoch_are_all_followed(run):
    class Twice(guide.GuideTrainer):
        async def run_epoch(self, epoch, run_id):
            await self.trainer_adapter.wait_until_complete(await super().run_epoch(epoch, run_id))
            return await super().run_epoch(epoch, run_id)

    await use(run, "guide", Twice).start(num_epochs=2)
    assert run.adapter.submitted == ["run-epoch-1", "run-epoch-1-job-2", "run-epoch-2", "run-epoch-2-job-2"]
    assert run.engine.version == 4
    shown = [(job.name, job.status, job.version) for job in read_jobs(run.path)]
    assert shown == [(name, "completed", number) for number, name in enumerate(run.adapter.submitted, 1)]


@pytest.mark.parametrize(
    ("base", "config", "how"),
    [
        (guide.GuideTrainer, guide.GuideTrainerConfig, "trainer_adapter.wait_until_complete"),
        (EpochTrainer, EpochTrainerConfig, "finish_epoch"),
    ],
)
async def test_a_job_that_is_not_waited_for_is_named_before_the_next_one(run, base, config, how):
    class ByHand(base):
        async def run(self, num_epochs):
            return [await self.run_epoch(epoch, "x") for epoch in range(num_epochs)]

    run.make_trainer = lambda: ByHand(config())
    with pytest.raises(TrainingError, match=rf"job run-epoch-1 .*`await self\.{how}"):
        await run.start(num_epochs=2)


async def test_an_epoch_trainer_with_a_loop_of_its_own_ends_its_run(run):
    class ByHand(EpochTrainer):
        async def run(self, num_epochs):
            ref = await self.run_epoch(0, "x")
            await self.finish_epoch(0, ref, status := await self.follow_job(0, ref))
            return [status]

    run.make_trainer = lambda: ByHand(EpochTrainerConfig())
    await run.start(num_epochs=1)
    assert read_facts(run.path).state == "finished"


async def test_validations_of_an_own_trainer_are_recorded_with_the_weights_that_were_measured(run):
    class Validating(guide.GuideTrainer):
        async def run(self, num_epochs):
            await self.run_validation_evaluation(0, "x")
            statuses = []
            for epoch in range(num_epochs):
                ref = await self.run_epoch(epoch, "x")
                statuses.append(await self.trainer_adapter.wait_until_complete(ref))
                await self.run_validation_evaluation(epoch, "x")
            return statuses

    run.validation = examples(10, "v")
    await use(run, "guide", Validating).start(num_epochs=2)
    entries = json.loads((run.path / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in entries] == [0, 1, 2]
    again = use(run.restart(), "guide", Validating)
    await again.start(num_epochs=2)
    assert again.engine.requests == []


async def test_a_mistyped_target_function_is_an_error(run):
    run.finetuning = run.finetuning.model_copy(update={"target_functions": ["<workflw>"]})
    with pytest.raises(RequestError, match=r"<workflw>.*'finetuning.target_functions: \[<workflow>\]'"):
        await run.start()


async def test_a_target_function_that_does_not_call_the_model_is_said_after_an_epoch(run):
    run.examples = examples(50)
    run.finetuning = run.finetuning.model_copy(update={"target_functions": ["judge"]})
    missed = r"200 episodes .*\(judge\).* '<workflow>'"
    with pytest.raises(RequestError, match=missed):
        await run.start(num_epochs=3)
    # The other epochs are not played.
    assert len(run.engine.requests) == 4 * 50
    again = run.restart()
    with pytest.raises(RequestError, match=missed):
        await again.start(num_epochs=3)
    assert again.engine.requests == []


async def test_failed_episodes_are_told_by_their_cause_and_not_by_target_functions(run):
    async def fail(example, episode):
        with episode.function("judge"):
            await play(example, episode)
        raise KeyError("mine")

    run.workflow, run.finetuning.error_budget = fail, 1.0
    with pytest.raises(TrainingError, match=r"(?s)trained on nothing.*KeyError: 'mine'"):
        await run.start(num_epochs=1)


ODD = {
    "when": date(2026, 1, 2),
    "loss": np.float32("nan"),
    "lengths": np.ones(2),
    "bytes": b"\xff",
    "kind": object,
    3: {(1, 2): {"a"}},
}


@pytest.mark.parametrize("base", [guide.GuideTrainer, EpochTrainer])
async def test_what_a_trainer_hands_to_super_is_in_every_file_and_in_the_journal(run, base):
    class Counting(base):
        def log_progress(self, epoch, metrics, output_dir=None):
            super().log_progress(epoch, {**metrics, "mine": float(epoch), **ODD}, output_dir)

    config = EpochTrainerConfig() if base is EpochTrainer else guide.GuideTrainerConfig()
    run.make_trainer = lambda: Counting(config)
    await run.start(num_epochs=2)
    assert [line["mine"] for line in training_metrics(run)] == [0.0, 1.0]
    assert [line["when"] for line in training_metrics(run)] == ["2026-01-02"] * 2
    with RunFolder.read(run.path) as folder:
        history = read_histories(folder.journal)[None]
    assert [entry.metrics["mine"] for entry in history.epochs] == [0.0, 1.0]
