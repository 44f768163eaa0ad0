"""Two models trained in one run, from a config to trained weights."""

import json

import pytest

from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.loop.targets import assemble_trainer
from etude.runtime import open_runtime
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from tests import guide_parts, several  # noqa: F401  the guide's builder is registered by its import
from tests.careless_trainer import CarelessTrainerConfig
from tests.several import Several, config
from tests.training import Interrupted, Watcher

VALIDATED = {"run_configuration": {"validation_dataset": {"_type": "test_counted", "prefix": "v"}}}


@pytest.fixture
def run(tmp_path):
    return Several(tmp_path / "run")


def history_of(run, target):
    with RunFolder.read(run.path) as folder:
        return histories(folder.journal, "run")[target]


async def test_both_models_are_trained_on_one_set_of_episodes(run):
    outcome = await run.start(config(num_epochs=2))
    assert run.requests() == {"prover": 3 * 4 * 2, "verifier": 3 * 4 * 2}
    assert [engine.version for engine in run.engines.values()] == [2, 2]
    assert [job.name for job in outcome.jobs] == [
        "run-epoch-1.prover",
        "run-epoch-1.verifier",
        "run-epoch-2.prover",
        "run-epoch-2.verifier",
    ]


async def test_builders_of_the_guides_kind_share_the_episodes_of_an_epoch(run):
    builders = {
        name: {"_type": "guide_builder", "num_generations": 4, "model": name}
        for name in ("prover", "verifier")
    }
    await run.start(
        config(
            num_epochs=2,
            prover={"trajectory_builder": "prover"},
            verifier={"trajectory_builder": "verifier"},
            trajectory_builders=builders,
        )
    )
    assert run.requests() == {"prover": 3 * 4 * 2, "verifier": 3 * 4 * 2}
    assert [engine.version for engine in run.engines.values()] == [2, 2]
    for name in ("prover", "verifier"):
        assert [entry.metrics["episodes"] for entry in history_of(run, name).epochs] == [12, 12]
        assert [entry.metrics["model_versions"] for entry in history_of(run, name).epochs] == [
            {"0": 12},
            {"1": 12},
        ]


async def test_each_model_has_its_own_reward_and_its_own_trajectories(run):
    await run.start(config(num_epochs=1))
    prover, verifier = (history_of(run, name).epochs[0].metrics for name in ("prover", "verifier"))
    assert (prover["target"], verifier["target"]) == ("prover", "verifier")
    assert prover["avg_reward"] == prover["evaluators"]["proved"]["mean"]
    assert verifier["avg_reward"] == verifier["evaluators"]["verified"]["mean"]
    assert prover["episodes"] == verifier["episodes"] == 12
    assert prover["model_versions"] == verifier["model_versions"] == {"0": 12}


class Counting(Watcher):
    """Counts the episodes that are announced and those that come."""

    def __init__(self):
        super().__init__()
        self.announced = self.ended = self.scores = 0

    def phase(self, name, total=None):
        super().phase(name, total)
        self.announced += total or 0

    def episode_finished(self, episode):
        self.ended += 1

    def scored(self, item):
        self.scores += 1


async def test_all_episodes_are_counted_where_targets_collect_differently(run):
    run.watcher = Counting()
    builders = {
        "few": {"_type": "grpo", "num_generations": 4},
        "many": {"_type": "grpo", "num_generations": 6},
    }
    targets = {"prover": {"trajectory_builder": "few"}, "verifier": {"trajectory_builder": "many"}}
    await run.start(config(num_epochs=2, trajectory_builders=builders, **targets))
    assert run.requests()["verifier"] == 3 * 6 * 2
    assert run.watcher.announced == run.watcher.ended == run.watcher.scores == 3 * 6 * 2


async def test_everybody_collects_before_anybody_is_trained_and_is_trained_before_anybody_adopts(
    run, monkeypatch
):
    events = []

    def noting(kind, name, method):
        async def call(*args, **kwargs):
            events.append(f"{kind} {name}")
            return await method(*args, **kwargs)

        return call

    async with _assembled(run, config(num_epochs=1)) as (trainer, runtime):
        for name, member in trainer.members.items():
            builder, adapter, engine = member.trajectory_builder, member.trainer_adapter, run.engines[name]
            monkeypatch.setattr(builder, "finalize", noting("collect", name, builder.finalize))
            monkeypatch.setattr(adapter, "submit", noting("submit", name, adapter.submit))
            monkeypatch.setattr(engine, "adopt", noting("adopt", name, engine.adopt))
        await trainer.initialize(runtime.config.finetuning)
        await trainer.run(1)
    assert events == [
        f"{kind} {name}" for kind in ("collect", "submit", "adopt") for name in ("prover", "verifier")
    ]


def _assembled(run, config):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened():
        with RunFolder.create(run.path.parent, "run") as folder:
            async with open_runtime(config, folder, engines=run.engines) as runtime:
                yield await assemble_trainer(runtime), runtime

    return opened()


async def test_models_take_turns_by_their_schedules(run):
    await run.start(config(num_epochs=4, prover={"every": 2}, verifier={"every": 2, "offset": 1}))
    prover, verifier = history_of(run, "prover"), history_of(run, "verifier")
    assert [bool(entry.status) for entry in prover.epochs] == [True, False, True, False]
    assert [bool(entry.status) for entry in verifier.epochs] == [False, True, False, True]
    assert prover.epochs[1].resting == "not its turn (every: 2, offset: 0)"
    assert [entry.version.number for entry in verifier.epochs] == [0, 1, 1, 2]
    # A model that rests is sampled all the same.
    assert run.requests() == {"prover": 3 * 4 * 4, "verifier": 3 * 4 * 4}


async def test_a_frozen_model_is_never_trained_and_its_reward_is_reported_all_the_same(run):
    outcome = await run.start(config(num_epochs=1, verifier={"frozen": True}, finetuning=VALIDATED))
    assert several.adapters["verifier"].submitted == []
    assert run.engines["verifier"].version == 0
    assert outcome.summary["targets"]["verifier"]["epochs_trained"] == 0
    assert outcome.summary["targets"]["verifier"]["after"]["n"] == 3
    assert run.watcher.warnings == []


async def test_one_validation_serves_all(run):
    await run.start(config(num_epochs=1, finetuning=VALIDATED))
    conversations = [request.conversation for request in run.engines["prover"].requests]
    assert sorted(name for name in conversations if name.startswith("validation")) == [
        f"validation/{epoch}/v{number}/0" for epoch in (0, 1) for number in range(3)
    ]
    for name in ("prover", "verifier"):
        assert [entry.version.number for entry in history_of(run, name).validations] == [0, 1]
        assert history_of(run, name).validations[0].metrics["target"] == name


async def test_what_is_shared_is_told_once(run):
    await run.start(config(num_epochs=1, finetuning=VALIDATED))
    assert run.watcher.events == [
        "validating",
        "validated 0",
        "validated 0",
        "epoch 1",
        "collecting",
        "training",
        "trained 1",
        "trained 1",
        "validating",
        "validated 1",
        "validated 1",
    ]


async def test_the_files_of_each_target_are_its_own_and_the_summary_has_all(run):
    outcome = await run.start(config(num_epochs=2, finetuning=VALIDATED))
    for name in ("prover", "verifier"):
        lines = (run.path / "targets" / name / "training_metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["target"] for line in lines] == [name, name]
        assert (run.path / "targets" / name / "validation_history.json").exists()
        assert (run.path / "checkpoints" / name).is_dir()
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary == outcome.summary
    assert summary["epochs_trained"] == 2
    assert [told["last_version"]["number"] for told in summary["targets"].values()] == [2, 2]


async def test_targets_may_ask_for_more_of_the_same_episodes(run):
    builders = {
        "few": {"_type": "grpo", "num_generations": 2},
        "many": {"_type": "grpo", "num_generations": 6},
    }
    targets = {"prover": {"trajectory_builder": "few"}, "verifier": {"trajectory_builder": "many"}}
    await run.start(config(num_epochs=1, trajectory_builders=builders, **targets))
    assert run.requests() == {"prover": 3 * 6, "verifier": 3 * 6}
    assert history_of(run, "prover").epochs[0].metrics["episodes"] == 6
    assert history_of(run, "verifier").epochs[0].metrics["episodes"] == 18


async def test_an_engine_that_goes_on_with_the_old_weights_is_an_error_that_names_the_model(run):
    async def ignore(version):
        pass

    run.engines["verifier"].adopt = ignore
    with pytest.raises(TrainingError, match="the model 'verifier' still samples from version 0"):
        await run.start(config(num_epochs=1))
    # The other's work is not lost.
    assert history_of(run, "prover").epochs[0].version.number == 1
    assert history_of(run, "verifier").epochs == ()


async def test_a_failed_job_is_submitted_again_and_the_others_are_not(run, monkeypatch):
    original = several.FakeAdapter.wait_until_complete

    async def failing(self, ref, poll_interval=10.0):
        status = await original(self, ref, poll_interval)
        broken = ref.run_id == "run-epoch-1.verifier"
        return status.model_copy(update={"status": TrainingStatusEnum.FAILED}) if broken else status

    monkeypatch.setattr(several.FakeAdapter, "wait_until_complete", failing)
    with pytest.raises(TrainingError, match=r"job run-epoch-1.verifier .* ended as 'failed'"):
        await run.start(config(num_epochs=1))
    again = run.restarted()
    await again.start(config(num_epochs=1))
    assert several.adapters["prover"].submitted == []
    assert several.adapters["verifier"].submitted == ["run-epoch-1.verifier-retry-1"]
    assert again.requests() == {"prover": 0, "verifier": 0}


@pytest.mark.parametrize("place", ["submit", "wait_until_complete"])
async def test_an_interrupted_run_goes_on_where_it_was(run, tmp_path, monkeypatch, place):
    (tmp_path / "other").mkdir()
    whole = Several(tmp_path / "other" / "run")
    expected = await whole.start(config(num_epochs=3))

    original = getattr(several.FakeAdapter, place)

    async def interrupted(self, job, *args, **kwargs):
        if job.run_id == "run-epoch-2.verifier":
            raise Interrupted
        return await original(self, job, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(several.FakeAdapter, place, interrupted)
        with pytest.raises(Interrupted):
            await run.start(config(num_epochs=3))
    again = run.restarted()
    outcome = await again.start(config(num_epochs=3))
    assert outcome.summary == expected.summary
    assert {name: run.requests()[name] + again.requests()[name] for name in run.engines} == whole.requests()


async def test_a_run_in_which_nothing_was_trained_fails_and_says_why(run):
    run.engines = {name: several.ScriptedEngine(lambda request: "no") for name in run.engines}
    with pytest.raises(TrainingError, match=r"trained on nothing in 1 epochs.*no episode has an advantage"):
        await run.start(config(num_epochs=1))
    assert [event for event in run.watcher.events if event.startswith("skipped")] == [
        f"skipped 1: {name}: nothing to train on: 3 × group in which no episode has an advantage; "
        "every reward is 0"
        for name in ("prover", "verifier")
    ]


async def test_a_target_that_was_never_trained_is_pointed_out(run):
    run.engines["verifier"] = several.ScriptedEngine(lambda request: "no")
    await run.start(config(num_epochs=1))
    flat, untrained = run.watcher.warnings
    assert flat.startswith("verifier: epoch 1: within each of the 3 groups no episode has an advantage")
    assert untrained == "verifier: was never trained in this run"


async def test_what_a_targets_backend_cannot_do_is_refused_before_anything_is_sampled(run):
    backends = {"backend": {"_type": "test_several", "methods": ["dpo"]}}
    with pytest.raises(CapabilityError, match="can do: dpo"):
        await run.start(config(trainer_adapters=backends))
    assert run.requests() == {"prover": 0, "verifier": 0}


async def test_jobs_from_the_base_model_need_a_backend_that_can(run):
    with pytest.raises(CapabilityError, match="fine_tune_from_scratch"):
        await run.start(config(verifier={"fine_tune_from_scratch": True}))


async def test_a_trainer_that_trains_one_model_is_refused(run):
    with pytest.raises(RequestError, match=r"CarelessTrainer, which trains one model.*EpochTrainer"):
        await run.start(config(trainers={"mine": {"_type": CarelessTrainerConfig.type_name}}))


async def test_an_agent_must_say_which_of_several_models_it_means(run):
    with pytest.raises(Exception, match="name the model to call"):
        await run.start(config(workflow="tests.training:play"))


async def test_one_step_of_the_loop_names_the_jobs_of_all(run):
    async with _assembled(run, config(prover={"offset": 1})) as (trainer, runtime):
        await trainer.initialize(runtime.config.finetuning)
        ref = await trainer.run_epoch(0, "run")
        assert list(ref.metadata["jobs"]) == ["verifier"]
        assert (await trainer.get_metrics("run"))["targets"]["prover"]["epochs_trained"] == 0
        await trainer.cleanup()


async def test_metrics_that_are_logged_for_all_are_in_the_history_of_each(run):
    async with _assembled(run, config()) as (trainer, runtime):
        await trainer.initialize(runtime.config.finetuning)
        await trainer.run(1)
        trainer.log_progress(0, {"mine": 0.5})
        histories = [member.history for member in trainer.members.values()]
        assert [history.epochs[0].metrics["mine"] for history in histories] == [0.5, 0.5]
        await trainer.cleanup()
