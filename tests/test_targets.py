"""Two models trained in one run, from a config to trained weights."""

import pytest

from etude.core.errors import RequestError
from etude.loop.targets import assemble_trainer
from etude.runtime import open_runtime
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from tests import guide_parts, several  # noqa: F401  the guide's builder is registered by its import
from tests.careless_trainer import CarelessTrainerConfig
from tests.several import Several, config

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


async def test_a_trainer_that_trains_one_model_is_refused(run):
    with pytest.raises(RequestError, match=r"CarelessTrainer, which trains one model.*EpochTrainer"):
        await run.start(config(trainers={"mine": {"_type": CarelessTrainerConfig.type_name}}))


async def test_an_agent_must_say_which_of_several_models_it_means(run):
    with pytest.raises(Exception, match="name the model to call"):
        await run.start(config(workflow="tests.training:play"))
