"""Training at a language-model server: all methods, and its engine out of the way meanwhile."""

import pytest

from etude.algorithms.episodes import ScoredEpisode
from etude.algorithms.samples import branches_of
from etude.backends import openai_adapters
from etude.backends.lm_client import BadResponseError, ClientTimeoutError
from etude.config.finetuning import FinetuneConfig
from etude.core.edge import sample_of, trajectory_of
from etude.core.errors import BackendError, TrainingError
from etude.core.job import Skipped, TrainingJobRef, TrainingStatusEnum
from etude.core.training_rows import GrpoRow
from etude.core.trajectory import TrajectoryCollection
from tests.algorithms.scripted_episodes import conversation, episode
from tests.backends.lm_stand_in import LmStandIn
from tests.backends.test_openai_jobs import dpo, imitated, supervised


def compared(job="job"):
    records = [episode(conversation("q", reply), generation=place) for place, reply in enumerate("ab")]
    scored = [
        ScoredEpisode(each, float(each.generation), tuple(branches_of(each, ["*"], None))) for each in records
    ]
    group = [trajectory_of(sample) for each in scored for sample in each.samples()]
    return TrajectoryCollection(trajectories=[group, group], run_id=job, method="grpo")


@pytest.mark.parametrize("data", [supervised(), dpo(), compared()], ids=lambda data: data.method)
async def test_a_job_of_each_method_makes_a_model(data):
    server = LmStandIn()
    adapter = server.adapter(n_epochs=2, hyperparameters={"learning_rate": 0.1})
    await adapter.initialize(FinetuneConfig())
    ref = await adapter.submit(data)
    status = await adapter.wait_until_complete(ref, poll_interval=0)
    assert status.status is TrainingStatusEnum.COMPLETED
    assert (ref.backend, status.metadata["model_version"]["number"]) == ("lm_server", 1)
    method = server.jobs["ftjob-0"]["method"]
    assert method["type"] == data.method
    parameters = method[data.method]["hyperparameters"]
    assert (parameters["n_epochs"], parameters["learning_rate"]) == (2, 0.1)
    assert ("beta" in parameters) is (data.method == "dpo")
    assert server.engine == []


async def test_a_grpo_row_is_a_group_as_it_was_sampled():
    server = LmStandIn()
    data = compared()
    await server.adapter().submit(data)
    rows = [GrpoRow.model_validate(row) for row in server.rows("ftjob-0")]
    assert rows == [GrpoRow.of_group([*map(sample_of, group)]) for group in data.trajectories]
    assert [one.reward for one in rows[0].trajectories] == [0.0, 1.0]


async def test_what_was_sampled_without_tokens_cannot_be_a_row():
    item = imitated("q", "a")
    bare = [one.model_copy(update={"token_ids": None}) for one in item.episode]
    group = [item.model_copy(update={"episode": bare})]
    data = TrajectoryCollection(trajectories=[group], run_id="job", method="grpo")
    server = LmStandIn()
    with pytest.raises(TrainingError, match="no token ids"):
        await server.adapter().submit(data)
    assert server.files == {}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "all rewards within a group are the same"),
        ({"beta": 0.1}, "beta pulls to the model that the job starts from"),
        ({"entropy_bonus": 0.1}, None),
    ],
)
async def test_groups_of_equal_rewards_are_not_uploaded_unless_the_loss_has_more_than_rewards(options, why):
    server, data = LmStandIn(), compared()
    flat = [[one.model_copy(update={"reward": 1.0}) for one in group] for group in data.trajectories]
    result = await server.adapter().submit(data.model_copy(update={"trajectories": flat, "options": options}))
    assert bool(server.files) is (why is None)
    if why is not None:
        assert why in result.reason


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled"])
async def test_the_engine_is_away_while_a_job_trains_and_back_however_it_ends(ending):
    server = LmStandIn(ending=ending)
    adapter = server.adapter(free_engine=True)
    await adapter.initialize(FinetuneConfig())
    ref = await adapter.submit(supervised())
    assert server.status["status"] == "stopped"
    await adapter.wait_until_complete(ref, poll_interval=0)
    # The server sees to it; the adapter waits until it is so.
    assert server.engine == ["away", "back", "start"]


async def test_the_engine_stays_when_nothing_trains_or_both_fit():
    server = LmStandIn()
    assert isinstance(await server.adapter(free_engine=True, min_rows=11).submit(supervised()), Skipped)
    for request in ("POST /files", "POST /fine_tuning/jobs"):
        server.faults[request] = [400]
        with pytest.raises(BackendError):
            await server.adapter(free_engine=True).submit(supervised())
    adapter = server.adapter()
    ref = await adapter.submit(supervised())
    assert server.status["status"] == "running"
    await adapter.wait_until_complete(ref, poll_interval=0)
    assert server.engine == []


async def test_an_engine_that_does_not_come_back_is_an_error():
    server = LmStandIn()
    adapter = server.adapter(free_engine=True)
    ref = await adapter.submit(supervised())
    server.faults["POST /engine/start"] = [503] * 5
    with pytest.raises(BadResponseError, match=r"POST .*/engine/start answered 503"):
        await adapter.wait_until_complete(ref, poll_interval=0)


async def test_a_server_that_is_away_is_told_before_anything_is_sampled(monkeypatch):
    monkeypatch.setattr(openai_adapters, "READY_SECONDS", 0)
    server = LmStandIn()
    server.faults["GET /health"] = ["lost"] * 6
    adapter = server.adapter()
    assert not await adapter.is_healthy() and "the connection broke" in (adapter.unhealthy_because or "")
    with pytest.raises(ClientTimeoutError):
        await adapter.initialize(FinetuneConfig())
    assert await adapter.is_healthy()


async def test_a_job_that_the_server_does_not_know_is_not_found():
    ref = TrainingJobRef(run_id="lost", backend="lm_server")
    assert (await LmStandIn().adapter().status(ref)).status is TrainingStatusEnum.NOT_FOUND
