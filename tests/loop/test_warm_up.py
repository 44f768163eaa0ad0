"""Runs that collect ahead while a job trains, and runs with a warm-up."""

import asyncio
import json

import pytest

from etude.backends.trainer_adapter import Capabilities
from etude.config.finetuning import UntilConfig
from etude.core.errors import CapabilityError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.loop.evaluation import load_version
from etude.run import Run as StoredRun
from etude.store.facts import choose_version
from etude.verbs import new_run, train_in
from tests import guide_parts as guide
from tests.crashing import run_to_end
from tests.crashing import warm_up_config as config
from tests.support import one_quick, until
from tests.training import FakeAdapter, Interrupted, Run, examples, interrupt, learning_engine


def test_the_base_is_untouched_what_imitated_is_a_version_and_training_has_an_optimiser_of_its_own(tmp_path):
    run_to_end("warm-up", tmp_path)
    whole = tmp_path / "run"
    run = StoredRun(whole)
    warm_up, before, warm = (run.summary[key] for key in ("warm_up", "before", "warm"))
    assert warm_up["version"] == warm["version"] == choose_version(whole, "warm-up").number >= 2
    assert (before["version"], before["measured"]) == (0, "validation examples, before training (v0)")
    assert (
        warm["measured"] == f"validation examples, after the warm-up, before training (v{warm_up['version']})"
    )
    assert warm_up["avg_reward"] >= 0.1
    base, warm = (load_version(choose_version(whole, wish)) for wish in ("base", "warm-up"))
    assert base.digest() != warm.digest()
    jobs = [job for job in run.jobs if job.epoch == 0]
    assert [job.version for job in jobs] == [*range(1, warm_up["version"] + 1)]
    assert {job.status for job in jobs} == {"completed"}
    # The optimiser and its schedule begin anew with training.
    last, trained = run.summary["last_version"]["number"], run.summary["epochs_trained"]
    state = json.loads((whole / "checkpoints" / f"v{last}" / "learner.json").read_text())
    assert state == {"step": trained, "trained": trained}


class Taking(FakeAdapter):
    """Takes the hyperparameters of a warm-up."""

    def use_hyperparameters(self, hyperparameters):
        """Nothing depends on them."""


def yes(examples):
    """A transcript for each example."""
    question = {"role": "user", "content": "yes?"}
    return [[question, {"role": "assistant", "content": "yes"}] for _ in examples]


@pytest.mark.parametrize("is_own", one_quick(True, False))
async def test_any_trainer_has_it_and_it_ends_when_the_reward_is_there(tmp_path, is_own):
    run = Run(tmp_path / "run")
    run.adapter = Taking(tmp_path / "backend")
    run.engine = learning_engine(base=0, step=34)
    run.examples, run.validation = examples(20), examples(40, "v")
    run.finetuning.warm_up = {"transcripts": f"{__name__}:yes", "until": {"reward": 0.5}}
    run.make_trainer = guide.TRAINERS["guide" if is_own else "epochs"]
    await run.start(num_epochs=1)
    assert run.adapter.submitted == ["run-warm-up-1", "run-warm-up-2", "run-epoch-1"]
    assert StoredRun(run.path).summary["warm_up"]["version"] == 2


def test_what_is_out_of_reach_ends_the_run_with_what_was_reached(tmp_path):
    settings = config(tmp_path)
    shorter = {"max_steps": 8, "until": UntilConfig(loss=0.01)}
    settings.finetuning.warm_up = settings.finetuning.warm_up.model_copy(update=shorter)
    with new_run(settings, "run") as run, pytest.raises(TrainingError, match=r"8 steps .* \d.*loss 0\.01"):
        asyncio.run(train_in(settings, run))


OF_AN_EPOCH = 12


@pytest.fixture
def ahead(tmp_path):
    found = Run(tmp_path / "run")
    found.finetuning = found.finetuning.model_copy(update={"collect_ahead": True})
    return found


async def test_a_job_trains_while_the_next_episodes_are_collected(ahead):
    async def while_others_are_collected(status):
        """Ends when the next epoch's episodes are there: never, if they were collected afterwards."""
        wanted = OF_AN_EPOCH * (min(len(ahead.adapter.submitted), 2) + 1)
        await until(lambda: len(ahead.engine.requests) >= wanted)
        return status

    ahead.adapter.behave = while_others_are_collected
    trainer = await ahead.start(num_epochs=3)
    assert [entry.sampled_from.number for entry in trainer.history.epochs] == [0, 0, 1]
    assert [entry.version.number for entry in trainer.history.epochs] == [1, 2, 3]
    assert len(ahead.engine.requests) == 3 * OF_AN_EPOCH


async def test_a_job_that_failed_ends_the_run_at_once_and_what_was_collected_is_not_lost(ahead, tmp_path):
    asked = asyncio.Event()
    answer = ahead.engine.complete

    async def slow_in_the_second_epoch(request):
        if len(ahead.engine.requests) >= OF_AN_EPOCH + 4:
            asked.set()
            await asyncio.sleep(3600)
        return await answer(request)

    async def fail(status):
        await asked.wait()
        return status.model_copy(update={"status": TrainingStatusEnum.FAILED, "message": "no room"})

    ahead.engine.complete, ahead.adapter.behave = slow_in_the_second_epoch, fail
    async with asyncio.timeout(60):
        with pytest.raises(TrainingError, match="no room"):
            await ahead.start(num_epochs=2)
    again = ahead.restart()
    trainer = await again.start(num_epochs=2)
    assert [entry.sampled_from.number for entry in trainer.history.epochs] == [0, 0]
    assert len(ahead.engine.requests) + len(again.engine.requests) == 2 * OF_AN_EPOCH


async def test_going_on_without_it_never_trains_on_what_is_too_old(ahead):
    # The first epoch is recorded by the second submission, and the second collected.
    ahead.adapter.after_submit = lambda name: interrupt(name) if name == "run-epoch-2" else None
    with pytest.raises(Interrupted):
        await ahead.start(num_epochs=3)
    again = ahead.restart()
    again.finetuning = ahead.finetuning.model_copy(update={"collect_ahead": False})
    with pytest.raises(TrainingError, match=r"epoch 2 .* version 1.*collect_ahead"):
        await again.start(num_epochs=3)


@pytest.mark.parametrize(
    ("capabilities", "told"),
    [
        (Capabilities(versions=True, samples_while_training=False), "engine .*'finetuning.collect_ahead'"),
        (Capabilities(), "which weights.*'finetuning.collect_ahead'"),
    ],
)
async def test_a_backend_that_cannot_bound_the_age_is_refused(ahead, tmp_path, capabilities, told):
    ahead.adapter = FakeAdapter(tmp_path / "backend", capabilities=capabilities)
    with pytest.raises(CapabilityError, match=told):
        await ahead.start()
    assert ahead.engine.requests == []
