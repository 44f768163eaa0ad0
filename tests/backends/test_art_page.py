"""The adapter as its reference page has it: made of its config alone, with its attributes and errors."""

import asyncio

import pytest

import etude
from etude.core.trajectory import EpisodeItem, Trajectory
from tests.backends.art_stand_in import KEY, StandIn, running
from tests.backends.test_art_adapter import batch
from tests.backends.test_art_wire import ordered


@pytest.fixture
def server():
    with running(StandIn()) as found:
        yield found


@pytest.fixture
async def adapter(server):
    config = etude.ARTTrainerAdapterConfig(
        backend={"base_url": server.url, "name": "agent", "api_key": KEY, "engine_args": {"seed": 3}},
        recover_wait=0.0,
        retry_wait=0.001,
    )
    made = etude.ARTTrainerAdapter(config)
    yield made
    await made.cleanup()


async def test_it_has_the_pages_attributes_before_anything_is_asked(adapter, server):
    assert isinstance(adapter, etude.TrainerAdapter)
    assert adapter.remote_backend.url == server.url
    assert (adapter.model.name, adapter.model.project) == ("agent", "trainer_project")
    assert adapter.model.base_model == "Qwen/Qwen2.5-7B-Instruct" and adapter.model.trainable
    assert adapter._model_internal_config["engine_args"] == {"seed": 3}
    assert adapter.training_jobs == adapter._training_jobs == {}


async def test_it_trains_without_a_run_around_it(adapter, server):
    await adapter.initialize(etude.FinetuneConfig())
    assert await adapter.is_healthy()
    server.pause = 0.2
    ref = await adapter.submit(batch("mine"))
    assert (ref.run_id, ref.backend) == ("mine", "openpipe_art")
    assert isinstance(adapter.training_jobs["mine"], asyncio.Task)
    assert (await adapter.status(ref)).status == "running"
    done = await adapter.wait_until_complete(ref, poll_interval=0.1)
    assert done.status == (await adapter.status(ref)).status == "completed"
    assert adapter.training_jobs["mine"].done()
    unknown = etude.TrainingJobRef(run_id="nobody", backend="openpipe_art")
    assert (await adapter.status(unknown)).status == "not_found"


async def test_it_says_where_its_job_failed_and_what_is_not_healthy(adapter, server, tmp_path):
    await adapter.initialize(etude.FinetuneConfig())
    adapter.log_progress(await adapter.submit(batch("mine")), {"loss": 0.5}, output_dir=str(tmp_path))
    assert '"loss": 0.5' in (tmp_path / "openpipe_art_jobs.jsonl").read_text()
    away = etude.ARTTrainerAdapter(
        etude.ARTTrainerAdapterConfig(backend={"ip": "127.0.0.1", "port": 1}, max_retries=0)
    )
    assert not await away.is_healthy()
    with pytest.raises(etude.EtudeError, match="not initialized; call initialize"):
        await away.status(etude.TrainingJobRef(run_id="x", backend="openpipe_art"))
    await away.cleanup()


async def test_an_order_that_the_page_rules_out_is_a_value_error(adapter):
    wrong = ordered("user", "other", "assistant")
    with pytest.raises(ValueError, match="role other"):
        await adapter._validate_episode_order(wrong)
    with pytest.raises(ValueError, match="role other"):
        await adapter._construct_trajectory_groups([[ordered("user", "assistant"), wrong]])


async def test_trajectories_become_arts_groups_one_for_each_example(adapter):
    good = ordered("system", "system", "user", "assistant")
    await adapter._validate_episode_order(good)
    first, second = await adapter._construct_trajectory_groups(
        [[good, ordered("user", "assistant", reward=0.5)], [ordered("user", "assistant")]]
    )
    assert [trajectory.reward for trajectory in first.trajectories] == [1.0, 0.5]
    *asked, choice = first.trajectories[0].messages_and_choices
    assert [message["role"] for message in asked] == ["system", "system", "user"]
    assert choice.message.content == "assistant" and choice.finish_reason == "stop"
    (token,) = choice.logprobs.content
    assert (token.token, token.logprob) == ("token_id:7", -0.5)
    assert len(second.trajectories) == 1


@pytest.mark.parametrize(
    ("logprobs", "known"),
    [
        ([-0.5], None),
        ({"content": [{"token": "yes", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}, ["yes"]),
        ({}, None),
    ],
)
async def test_an_answer_without_token_ids_has_the_logprobs_that_came_with_it(adapter, logprobs, known):
    said = [
        EpisodeItem(role="user", content="q"),
        EpisodeItem(role="assistant", content="yes", logprobs=logprobs),
    ]
    (group,) = await adapter._construct_trajectory_groups([[Trajectory(episode=said, reward=1.0)]])
    choice = group.trajectories[0].messages_and_choices[-1]
    content = None if choice.logprobs is None else [each.token for each in choice.logprobs.content]
    assert content == known
