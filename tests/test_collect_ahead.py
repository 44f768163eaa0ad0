"""Collecting for the next epoch while a job trains."""

import asyncio

import pytest

from etude.backends.capabilities import Capabilities
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import CapabilityError, TrainingError
from etude.core.job import TrainingStatusEnum
from tests.training import FakeAdapter, Interrupted, Run

OF_AN_EPOCH = 12


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path / "run")
    found.finetuning = found.finetuning.model_copy(update={"collect_ahead": True})
    return found


def sampled_from(trainer):
    return [entry.sampled_from.number for entry in trainer.history.epochs]


async def test_a_job_trains_while_the_next_episodes_are_collected(run):
    async def while_others_are_collected(status):
        """Ends when the next epoch's episodes are there: never, if they were collected afterwards."""
        wanted = OF_AN_EPOCH * (min(len(run.adapter.submitted), 2) + 1)
        async with asyncio.timeout(60):
            while len(run.engine.requests) < wanted:  # noqa: ASYNC110  the engine is a plain stand-in
                await asyncio.sleep(0.01)
        return status

    run.adapter.behave = while_others_are_collected
    trainer = await run.start(num_epochs=3)
    assert sampled_from(trainer) == [0, 0, 1]
    assert [entry.version.number for entry in trainer.history.epochs] == [1, 2, 3]
    assert len(run.engine.requests) == 3 * OF_AN_EPOCH


async def test_a_job_that_failed_ends_the_run_at_once_and_what_was_collected_is_not_lost(run, tmp_path):
    asked = asyncio.Event()
    answer = run.engine.complete

    async def slow_in_the_second_epoch(request):
        if len(run.engine.requests) >= OF_AN_EPOCH + 4:
            asked.set()
            await asyncio.sleep(3600)
        return await answer(request)

    async def fail(status):
        await asked.wait()
        return status.model_copy(update={"status": TrainingStatusEnum.FAILED, "message": "no room"})

    run.engine.complete, run.adapter.behave = slow_in_the_second_epoch, fail
    async with asyncio.timeout(60):
        with pytest.raises(TrainingError, match="no room"):
            await run.start(num_epochs=2)
    again = run.restarted()
    trainer = await again.start(num_epochs=2)
    assert sampled_from(trainer) == [0, 0]
    assert len(run.engine.requests) + len(again.engine.requests) == 2 * OF_AN_EPOCH


async def test_going_on_without_it_never_trains_on_what_is_too_old(run):
    await interrupted_at_the_second_submission(run)
    again = run.restarted()
    again.finetuning = run.finetuning.model_copy(update={"collect_ahead": False})
    with pytest.raises(TrainingError, match=r"epoch 2 were not sampled from version 1.*collect_ahead"):
        await again.start(num_epochs=3)


async def interrupted_at_the_second_submission(run):
    """The first epoch is recorded by then, and the second collected."""
    submit = run.adapter.submit

    async def once(trajectories):
        if run.adapter.submitted:
            raise Interrupted
        return await submit(trajectories)

    run.adapter.submit = once
    with pytest.raises(Interrupted):
        await run.start(num_epochs=3)
    run.adapter.submit = submit


@pytest.mark.parametrize(
    ("capabilities", "settings", "told"),
    [
        (
            Capabilities(versions=True, samples_while_training=False),
            {"collect_ahead": True},
            "may be away then",
        ),
        (Capabilities(), {"collect_ahead": True}, "does not say which weights"),
    ],
)
async def test_a_backend_that_cannot_bound_the_age_is_refused(run, tmp_path, capabilities, settings, told):
    run.finetuning = FinetuneConfig(**run.finetuning.model_dump() | {"collect_ahead": False} | settings)
    run.adapter = FakeAdapter(tmp_path / "backend", capabilities=capabilities)
    with pytest.raises(CapabilityError, match=told):
        await run.start()
    assert run.engine.requests == []
