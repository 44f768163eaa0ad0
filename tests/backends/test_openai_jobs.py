"""Fine-tuning jobs through the official SDK, against a stand-in that answers as OpenAI does."""

import re
from itertools import islice

import pytest

from etude.algorithms.samples import make_sample
from etude.backends import openai_jobs
from etude.backends.openai_api import TrainingJobNotFoundClientError, dpo_row
from etude.backends.openai_jobs import OpenAiAdapter, OpenAiAdapterConfig
from etude.backends.trainer_adapter import pauses
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import BackendError, CapabilityError
from etude.core.job import Skipped, TrainingJobRef, TrainingStatusEnum
from etude.core.message import OpenAIMessage
from etude.core.sample import TrajectoryCollection, to_trajectory
from etude.core.trajectory import DPOItem, Trajectory
from tests.algorithms.scripted_episodes import conversation, episode
from tests.backends.openai_stand_in import BASE, StandIn, error_response


def imitation(*turns):
    record = episode(conversation(*turns))
    return to_trajectory(make_sample(record.calls, record, 1.0))


def imitations(job="run-epoch-1", rows=10):
    made = [[imitation(f"question {number}", "answer")] for number in range(rows)]
    return TrajectoryCollection(trajectories=made, run_id=job, method="supervised")


def preference(**fields):
    prompt = [OpenAIMessage(role="user", content="q")]
    item = DPOItem(prompt=prompt, chosen_response="good", rejected_response="bad", **fields)
    return Trajectory(episode=[item], reward=1.0)


def dpo(job="pairs", rows=10):
    return TrajectoryCollection(trajectories=[[preference()] * rows], run_id=job, method="dpo")


def backend(server, model=BASE, **settings):
    return OpenAiAdapter(OpenAiAdapterConfig(**settings), server.client(), model)


async def states(adapter, ref):
    """The states of a job until it is over."""
    found = [await adapter.status(ref)]
    while not found[-1].status.is_final:
        found.append(await adapter.status(ref))
    return found


async def test_a_job_goes_through_the_states_of_the_api_to_a_new_model():
    adapter = backend(StandIn())
    found = await states(adapter, await adapter.submit(imitations()))
    assert [one.status for one in found] == ["pending", "pending", "running", "completed"]
    made = found[-1].version
    assert (made.number, made.location) == (1, f"ft:{BASE}:org::ftjob-0")
    assert found[-1].metadata["metrics"]["trained_tokens"] > 0
    assert (await adapter.current_version()).location == f"ft:{BASE}:org::ftjob-0"


async def test_what_is_sent_is_what_the_api_documents():
    server = StandIn()
    await backend(server, hyperparameters={"n_epochs": 2, "beta": 0.2}).submit(dpo())
    job = server.jobs["ftjob-0"]
    assert (job["model"], job["suffix"]) == (BASE, "pairs")
    assert job["method"] == {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "beta": 0.2}}}
    hashes = {"etude_data": r"[0-9a-f]{16}", "etude_training": r"[0-9a-f]{16}"}
    assert all(re.fullmatch(form, job["metadata"].pop(key)) for key, form in hashes.items())
    assert job["metadata"] == {
        "etude_job": "pairs",
        "etude_version": "1",
        "etude_method": "dpo",
        "etude_start": BASE,
    }
    assert server.rows("ftjob-0") == 10 * [
        {
            "input": {"messages": [{"role": "user", "content": "q"}]},
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad"}],
        }
    ]


def test_a_prompt_that_is_a_text_is_said_by_the_user_and_pairs_of_several_turns_are_refused():
    item = DPOItem(prompt="q", chosen_response="a", rejected_response="b")
    assert dpo_row(item)["input"] == {"messages": [{"role": "user", "content": "q"}]}
    with pytest.raises(CapabilityError, match="compare: turns"):
        dpo_row(preference(turns=3).episode[0])
    said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "?"}]
    with pytest.raises(CapabilityError, match="compare: turns"):
        dpo_row(preference(chosen_messages=said[:1], rejected_messages=[*said, said[0]]).episode[0])


async def test_another_process_finds_a_job_by_its_name_alone():
    server = StandIn()
    await backend(server).submit(imitations())
    for number in range(30):
        await backend(server).submit(imitations(f"other-{number}"))
    ref = TrainingJobRef(run_id="run-epoch-1", backend="openai")
    assert (await backend(server).status(ref)).status is TrainingStatusEnum.PENDING


async def test_the_next_job_starts_from_the_last_model_or_from_the_base_and_versions_count_on():
    server = StandIn()
    adapter = backend(server)
    base, numbers = await adapter.current_version(), []
    for name in "abc":
        if name == "c":
            await adapter.restore(base)
        status = await adapter.wait_until_complete(await adapter.submit(imitations(name)), poll_interval=0)
        numbers.append(status.version.number)
    assert [job["model"] for job in server.jobs.values()] == [BASE, f"ft:{BASE}:org::ftjob-0", BASE]
    assert numbers == [1, 2, 3]


async def test_too_few_rows_are_told_before_anything_is_uploaded():
    server = StandIn()
    skipped = await backend(server).submit(imitations(rows=9))
    assert isinstance(skipped, Skipped) and re.search(r"9 rows, .*\b10\b", skipped.reason)
    assert server.files == {}


async def test_a_job_can_be_cancelled_and_one_that_is_over_stays_so():
    adapter = backend(StandIn())
    ref = await adapter.submit(imitations())
    await adapter.cancel(ref)
    assert (await adapter.status(ref)).status is TrainingStatusEnum.CANCELED
    await adapter.cancel(ref)
    await adapter.cancel(TrainingJobRef(run_id="nowhere", backend="openai"))


async def test_a_job_that_the_api_does_not_know_is_not_found():
    adapter = backend(StandIn())
    for metadata in (None, {"job_id": "ftjob-9"}):
        ref = TrainingJobRef(run_id="lost", backend="openai", metadata=metadata)
        assert (await adapter.status(ref)).status is TrainingStatusEnum.NOT_FOUND
        with pytest.raises(TrainingJobNotFoundClientError):
            await adapter.job(ref)


async def test_a_wrong_key_is_not_healthy_and_an_error_of_the_run():
    adapter = OpenAiAdapter(OpenAiAdapterConfig(), StandIn().client("sk-wrong"), BASE)
    assert not await adapter.is_healthy()
    assert await backend(StandIn()).is_healthy()
    for attempt in (adapter.submit(imitations()), adapter.initialize(FinetuneConfig())):
        with pytest.raises(BackendError, match=r"AuthenticationError.*Incorrect API key"):
            await attempt


async def test_the_numbers_of_the_newest_step_are_in_the_status():
    adapter = backend(StandIn(page=1))
    status = await adapter.wait_until_complete(await adapter.submit(imitations()), poll_interval=0)
    assert status.metadata["metrics"]["train_loss"] == 0.5
    assert status.progress == 100


@pytest.mark.parametrize("fault", ["lost", 500, 503])
@pytest.mark.parametrize(
    "where", ["POST /files", "POST /fine_tuning/jobs", "GET /files", "GET /fine_tuning/jobs"]
)
async def test_what_was_made_is_found_and_not_made_again_where_answers_get_lost(where, fault):
    server = StandIn()
    server.faults[where] = [fault] * 4
    ref = await backend(server).submit(imitations())
    assert ref.metadata["job_id"] == "ftjob-0"
    assert (len(server.jobs), len(server.files)) == (1, 1)
    posted = [
        head
        for head, name in zip(server.headers, server.requests, strict=True)
        if name == "POST /fine_tuning/jobs"
    ]
    assert {head["idempotency-key"] for head in posted} == {"run-epoch-1"}


async def test_an_api_that_is_away_for_a_while_is_waited_for():
    server = StandIn()
    server.faults["GET /fine_tuning/jobs/ID"] = ["lost", 503, 429]
    server.faults["GET /fine_tuning/jobs/ID/events"] = [500]
    adapter = backend(server)
    status = await adapter.wait_until_complete(await adapter.submit(imitations()), poll_interval=0)
    assert status.status is TrainingStatusEnum.COMPLETED


def test_pauses_between_two_looks_grow_up_to_a_limit():
    soon = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert list(islice(pauses(10.0, 30.0), 11)) == [*soon, 10.0, 15.0, 22.5, 30.0, 30.0]
    assert list(islice(pauses(9.0, 3.0), 9)) == [*soon, 9.0, 9.0, 9.0]
    assert list(islice(pauses(0.1, 0.2), 4)) == pytest.approx([0.1, 0.15, 0.2, 0.2])


@pytest.mark.parametrize(("fault", "limit"), [(503, 0), (403, 1000)])
async def test_one_that_stays_away_does_not_end_the_job(fault, limit, monkeypatch):
    monkeypatch.setattr(openai_jobs, "_OUTAGE_SECONDS", limit)
    server = StandIn()
    adapter = backend(server)
    ref = await adapter.submit(imitations())
    server.faults["GET /fine_tuning/jobs/ID"] = [fault] * 9
    with pytest.raises(BackendError, match=f"job {ref.run_id} .*continues.*`etude resume`"):
        await adapter.wait_until_complete(ref, poll_interval=0)
    assert server.jobs["ftjob-0"]["status"] == "validating_files"


async def test_a_key_is_never_in_an_error():
    server = StandIn()
    server.answer = lambda request: error_response(401, f"no {request.headers['authorization']}", "x")
    adapter = OpenAiAdapter(OpenAiAdapterConfig(), server.client("sk-secret"), BASE)
    with pytest.raises(BackendError, match=r"no Bearer \*\*\*"):
        await adapter.check()
