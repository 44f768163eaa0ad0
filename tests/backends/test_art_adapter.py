"""Jobs on an ART server, over real sockets, against a stand-in that answers as `art run` does."""

import asyncio
import re
from functools import partial

import pytest

import etude
from etude.backends.state_folders import JobNameTakenError
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import TrainingError
from etude.core.job import TrainingStatusEnum
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.integrations.art import adapter as adapter_module
from etude.integrations.art import client
from etude.integrations.art.adapter import ARTTrainerAdapter
from etude.integrations.art.client import ArtError, ArtInference
from etude.integrations.art.config import ARTTrainerAdapterConfig
from etude.wire.retries import RetryPolicy, with_retries
from tests.backends.art_stand_in import KEY, StandIn, running
from tests.backends.test_art_wire import collection, in_order, sample


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(adapter_module, "RECOVER_SECONDS", 0.0)
    monkeypatch.setattr(client, "with_retries", partial(with_retries, policy=RetryPolicy(first_wait=0.001)))


@pytest.fixture
def server():
    with running(StandIn()) as found:
        yield found


@pytest.fixture
async def adapters():
    """Adapters that are closed at the end."""
    made = []
    yield made
    for adapter in made:
        await adapter.cleanup()
        await adapter._engine.close()


@pytest.fixture
def backend(server, tmp_path, adapters):
    """Makes adapters as another process would: same server, same run folder."""

    async def make(*, initialized=True, folder=tmp_path, training=None, **settings):
        config = ARTTrainerAdapterConfig(
            backend={"base_url": server.url, "name": "agent", "api_key": KEY, **settings},
            training=training or {},
        )
        llm = OpenAiLlmConfig(
            model_name="agent", base_url=f"{server.url}/v1", return_token_ids=True, max_retries=0
        )
        inference = ArtInference(f"{server.url}/v1", KEY)
        adapter = ARTTrainerAdapter(config, engine=OpenAiEngine(llm), inference=inference, folder=folder)
        adapters.append(adapter)
        if initialized:
            await adapter.initialize(FinetuneConfig())
        return adapter

    return make


def batch(name="run-epoch-1", groups=2):
    pairs = [[sample(f"q{n}", "yes"), sample(f"q{n}", "no", reward=0.0)] for n in range(groups)]
    return collection(*pairs).model_copy(update={"run_id": name})


async def train(adapter, name="run-epoch-1"):
    return await adapter.wait_until_complete(await adapter.submit(batch(name)))


async def test_a_job_makes_the_next_step_and_it_is_served(server, backend):
    adapter = await backend()
    assert (await adapter.current_version()).location == "agent@0"
    status = await train(adapter)
    assert status.status is TrainingStatusEnum.COMPLETED
    made = status.version
    assert (made.number, made.location) == (1, "agent@1")
    assert status.metadata["metrics"]["gradient_steps"] == 2
    assert status.metadata["metrics"]["loss"] == pytest.approx((1 + 1 / 2) / 2)
    assert (await adapter.current_version()).number == 1


async def test_a_name_belongs_to_one_job(server, backend):
    adapter = await backend()
    ref = await adapter.submit(batch("name"))
    assert await adapter.submit(batch("name")) == ref
    with pytest.raises(JobNameTakenError, match="other data"):
        await adapter.submit(batch("name", groups=3))
    await adapter.wait_until_complete(ref)
    later = await backend(training={"learning_rate": 1e-4})
    for data, difference in [
        (batch("name", groups=3), "other data"),
        (batch("name"), "other hyperparameters"),
    ]:
        with pytest.raises(JobNameTakenError, match=difference):
            await later.submit(data)
    assert await (await backend()).submit(batch("name")) == ref
    assert len(server.jobs) == 1


async def test_a_server_of_0_4_serves_the_bare_name(server, backend, tmp_path, adapters):
    with running(StandIn(release="0.4")) as old:
        server.url = old.url
        adapter = await backend()
        status = await train(adapter)
        assert (status.version.location, status.version.number) == ("agent", 1)
        old.training = "nothing"  # It says nothing of a batch that it skips.
        assert "without training" in (await train(adapter, "next")).message


async def test_a_server_that_was_trained_before_goes_on_from_its_step(server, backend):
    server.steps["agent"] = 3
    adapter = await backend()
    assert adapter._engine.version == 3
    assert (await train(adapter)).version.number == 4


async def test_learning_rate_kl_and_loss_options_reach_the_server(server, backend):
    options = {"learning_rate": 1e-4, "beta": 0.1, "dev_config": {"epsilon": 0.3, "ppo": True}}
    adapter = await backend(
        training=options | {"trainer_args": {"weight_decay": 0.1}}, init_args={"max_seq_length": 4096}
    )
    await train(adapter)
    (job,) = server.jobs
    assert job["config"] == {"learning_rate": 1e-4, "beta": 0.1, "kl_penalty_coef": 0.1}
    assert job["dev_config"] == {"epsilon": 0.3, "ppo": True, "kl_penalty_coef": 0.1}
    assert job["model"]["_internal_config"] == {
        "trainer_args": {"learning_rate": 1e-4, "beta": 0.1, "weight_decay": 0.1},
        "init_args": {"max_seq_length": 4096},
    }
    assert server.keys == {f"Bearer {KEY}"}


async def left_alone(server, backend):
    """A job that is under way at the server, after the process that asked for it has ended."""
    server.pause = 30
    adapter = await backend()
    ref = await adapter.submit(batch())
    assert await asyncio.to_thread(server.begun.wait, 60)
    await adapter.cleanup()
    return ref


async def test_a_job_that_the_server_finished_without_us_is_found_by_the_step(server, backend):
    ref = await left_alone(server, backend)
    server.steps["agent"] += 1
    again = await backend()
    status = await again.status(ref)
    assert status.status is TrainingStatusEnum.COMPLETED
    assert "connection was lost" in status.message
    assert await again.submit(batch()) == ref
    assert len(server.jobs) == 1


async def test_a_job_whose_work_was_lost_is_not_there_and_is_trained_anew(server, backend):
    ref, again = await left_alone(server, backend), await backend()
    assert (await again.status(ref)).status is TrainingStatusEnum.NOT_FOUND
    server.pause = 0
    assert (await train(again)).status is TrainingStatusEnum.COMPLETED
    assert (len(server.jobs), server.steps["agent"]) == (2, 1)


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ("refused", "HTTP 500: Out of memory"),
        ("broken", "did not answer POST /_train_model"),
        ("half", "after 1 of 2 gradient steps, .*step 0"),
        ("garbled", "answered POST /_train_model with '<html>'"),
        ("no_step", "after 2 of 2 gradient steps, .*step 0"),
        ("doubled", "from step 0 to 2"),
        ("nothing", "to step 1 without training"),
        ("silent", "ReadTimeout"),
        ("refused", r"Out of memory, Bearer \*\*\*"),
    ],
)
async def test_a_job_that_was_not_done_has_failed_and_says_why(server, backend, monkeypatch, training, told):
    if training == "silent":
        monkeypatch.setattr(client, "SILENCE_SECONDS", 0.2)
    server.training = training
    status = await train(await backend())
    assert status.status is TrainingStatusEnum.FAILED
    assert re.search(told, status.message) and KEY not in status.message


async def test_a_lost_connection_is_no_failure_when_the_step_was_made(server, backend, monkeypatch):
    """A server that is busy after a job is asked again."""
    monkeypatch.setattr(adapter_module, "RECOVER_SECONDS", 60.0)
    server.training, server.silent_steps = "lost", 1
    status = await train(await backend())
    assert status.status is TrainingStatusEnum.COMPLETED
    assert "did not answer" in status.message


async def test_a_job_can_be_cancelled_and_one_that_is_over_stays_so(server, backend):
    server.pause = 30
    adapter = await backend()
    ref = await adapter.submit(batch())
    await adapter.cancel(ref)
    assert (await adapter.wait_until_complete(ref)).status is TrainingStatusEnum.CANCELED
    server.pause = 0
    done = await adapter.submit(batch("other"))
    await adapter.wait_until_complete(done)
    await adapter.cancel(done)
    assert (await adapter.status(done)).status is TrainingStatusEnum.COMPLETED


async def test_health_is_that_of_the_server_and_of_the_endpoint(server, backend):
    adapter = await backend()
    assert await adapter.is_healthy()
    server.well = False
    assert not await adapter.is_healthy()
    server.well, server.serves = True, False
    assert not await adapter.is_healthy()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"well": False}, "GET /healthcheck with HTTP 500: CUDA is gone"),
        ({"serves": False}, "serves neither 'agent@0' nor 'agent'; it serves: Qwen/"),
    ],
)
async def test_nothing_starts_on_a_server_with_a_fault(server, backend, fault, told):
    vars(server).update(fault)
    with pytest.raises(ArtError, match=told):
        await backend()


async def test_nobody_at_the_address_is_said_with_a_way_out(backend):
    with pytest.raises(ArtError, match=r"http://127.0.0.1:1 did not answer .*`art run`"):
        await backend(base_url="http://127.0.0.1:1")


async def test_a_run_goes_on_only_where_it_left_the_model(server, backend):
    adapter = await backend()
    base = await adapter.current_version()
    await train(adapter)
    newest = await adapter.current_version()
    await adapter.restore(base)
    server.steps["agent"] = 4
    with pytest.raises(TrainingError, match=rf"'agent' .*step 4 on {server.url}, .*step 0"):
        await adapter.restore(base)
    server.steps["agent"] = 0
    with pytest.raises(TrainingError, match=r"step 0 on .*step 1"):
        await adapter.restore(newest)


@pytest.fixture
async def alone(server):
    config = etude.ARTTrainerAdapterConfig(
        backend={"base_url": server.url, "name": "agent", "api_key": KEY, "engine_args": {"seed": 3}}
    )
    adapter = etude.ARTTrainerAdapter(config)
    yield adapter
    await adapter.cleanup()


async def test_it_has_the_pages_attributes_before_anything_is_asked(alone, server):
    assert isinstance(alone, etude.TrainerAdapter)
    assert alone.remote_backend.url == server.url
    assert (alone.model.name, alone.model.project) == ("agent", "trainer_project")
    assert alone.model.base_model == "Qwen/Qwen2.5-7B-Instruct" and alone.model.trainable
    assert alone._model_internal_config["engine_args"] == {"seed": 3}
    assert alone.training_jobs == alone._training_jobs == {}


async def test_it_trains_without_a_run_around_it(alone, server, tmp_path):
    await alone.initialize(etude.FinetuneConfig())
    ref = await alone.submit(batch("mine"))
    assert isinstance(alone.training_jobs["mine"], asyncio.Task)
    alone.log_progress(ref, {"loss": 0.5}, output_dir=str(tmp_path))
    assert '"loss": 0.5' in (tmp_path / "openpipe_art_jobs.jsonl").read_text()
    done = await alone.wait_until_complete(ref, poll_interval=0.1)
    assert done.status == (await alone.status(ref)).status == "completed"
    assert alone.training_jobs["mine"].done()


async def test_before_it_is_initialized_it_says_so():
    away = etude.ARTTrainerAdapter(etude.ARTTrainerAdapterConfig(backend={"ip": "127.0.0.1", "port": 1}))
    assert not await away.is_healthy()
    with pytest.raises(etude.EtudeError, match=r"not initialized.*initialize\(run_config\)"):
        await away.status(etude.TrainingJobRef(run_id="x", backend="openpipe_art"))
    await away.cleanup()


async def test_trajectories_become_arts_groups_one_for_each_example(alone):
    good = in_order("system", "system", "user", "assistant")
    await alone._validate_episode_order(good)
    first, second = await alone._construct_trajectory_groups(
        [[good, in_order("user", "assistant", reward=0.5)], [in_order("user", "assistant")]]
    )
    assert [trajectory.reward for trajectory in first.trajectories] == [1.0, 0.5]
    *asked, choice = first.trajectories[0].messages_and_choices
    assert [message["role"] for message in asked] == ["system", "system", "user"]
    assert choice["message"]["content"] == "assistant" and choice["finish_reason"] == "stop"
    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("token_id:7", -0.5)
    assert len(second.trajectories) == 1
