"""Fine-tuning jobs through the official SDK, against a stand-in that answers as OpenAI does."""

import pytest

from etude.adapters.openai_jobs import OpenAiJobs, OpenAiJobsConfig, TrainingJobNotFoundClientError
from etude.adapters.openai_rows import dpo_row, supervised_row
from etude.builders.branches import branches_of
from etude.builders.transcript import trajectory_of
from etude.core.errors import CapabilityError, TrainingError
from etude.core.job import TrainingJobRef, TrainingStatusEnum
from etude.core.message import OpenAIMessage
from etude.core.skipped import Skipped
from etude.core.trajectory import DPOItem, Trajectory, TrajectoryCollection
from tests.adapters.openai_stand_in import StandIn
from tests.builders.scripted_episodes import call, conversation, episode

BASE = "gpt-4o-mini-2024-07-18"


def imitated(*turns):
    record = episode(conversation(*turns))
    (branch,) = branches_of(record, ["*"], None)
    return trajectory_of(branch, record, 1.0, 1.0, {})


def supervised(job="run-epoch-0", rows=10):
    made = [[imitated(f"question {number}", "answer")] for number in range(rows)]
    return TrajectoryCollection(trajectories=made, run_id=job, method="supervised")


def preference(**facts):
    item = DPOItem(
        prompt=[OpenAIMessage(role="user", content="q")], chosen_response="good", rejected_response="bad"
    )
    return Trajectory(episode=[item], reward=1.0, metadata=facts)


def dpo(job="pairs", rows=10):
    return TrajectoryCollection(trajectories=[[preference()] * rows], run_id=job, method="dpo")


def backend(server, **settings):
    return OpenAiJobs(OpenAiJobsConfig(**settings), server.client(), BASE)


async def states(adapter, ref):
    """The states of a job until it is over."""
    found = [await adapter.status(ref)]
    while not found[-1].status.is_final:
        found.append(await adapter.status(ref))
    return found


async def test_a_job_goes_through_the_states_of_the_api_to_a_new_model():
    server = StandIn()
    adapter = backend(server)
    ref = await adapter.submit(supervised())
    found = await states(adapter, ref)
    assert [one.status for one in found] == ["pending", "pending", "running", "completed"]
    made = found[-1].metadata["model_version"]
    assert (made["number"], made["location"]) == (1, f"ft:{BASE}:org::ftjob-0")
    assert found[-1].metadata["metrics"]["trained_tokens"] > 0
    assert (await adapter.current_version()).location == f"ft:{BASE}:org::ftjob-0"


async def test_what_is_sent_is_what_the_api_documents():
    server = StandIn()
    await backend(server, n_epochs=2, beta=0.2).submit(dpo())
    job = server.jobs["ftjob-0"]
    assert (job["model"], job["suffix"]) == (BASE, "pairs")
    assert job["method"] == {
        "type": "dpo",
        "dpo": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": "auto", "beta": 0.2}},
    }
    assert job["metadata"] == {"etude_job": "pairs", "etude_version": "1"}
    assert server.rows("ftjob-0") == 10 * [
        {
            "input": {"messages": [{"role": "user", "content": "q"}]},
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad"}],
        }
    ]


def test_a_supervised_row_is_the_conversation():
    assert supervised_row(imitated("hi", "hello", "bye", "so long")) == {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "so long"},
        ]
    }


def test_what_the_model_did_not_say_has_no_weight_and_tool_calls_stay_what_they_are():
    wire = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "an example"},
        {"role": "tool", "content": "seen", "tool_call_id": "call_0"},
    ]
    reply = {"role": "assistant", "content": None, "tool_calls": [wire]}
    record = episode([call(0, messages, reply, "<hi>", "look.")])
    (branch,) = branches_of(record, ["*"], None)
    assert supervised_row(trajectory_of(branch, record, 1.0, 1.0, {}))["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "an example", "weight": 0},
        {"role": "tool", "content": "seen", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "", "tool_calls": [wire]},
    ]


def test_a_prompt_that_is_a_text_is_said_by_the_user():
    item = DPOItem(prompt="q", chosen_response="a", rejected_response="b")
    assert dpo_row(item, {})["input"] == {"messages": [{"role": "user", "content": "q"}]}


def test_pairs_of_several_turns_are_refused_with_a_way_out():
    with pytest.raises(CapabilityError, match="compare: turns"):
        dpo_row(preference().episode[0], {"turns": 3})


async def test_a_job_that_is_submitted_twice_is_made_once():
    server = StandIn()
    first = await backend(server).submit(supervised())
    again = await backend(server).submit(supervised())
    assert first == again
    assert len(server.jobs) == len(server.files) == 1


async def test_another_process_finds_a_job_by_its_name_alone():
    server = StandIn()
    await backend(server).submit(supervised())
    for number in range(30):
        await backend(server).submit(supervised(f"other-{number}"))
    ref = TrainingJobRef(run_id="run-epoch-0", backend="openai")
    assert (await backend(server).status(ref)).status is TrainingStatusEnum.PENDING


async def test_the_next_job_starts_from_the_model_that_the_last_one_made():
    server = StandIn()
    adapter = backend(server)
    await adapter.wait_until_complete(await adapter.submit(supervised("a")), poll_interval=0)
    status = await adapter.wait_until_complete(await adapter.submit(supervised("b")), poll_interval=0)
    assert server.jobs["ftjob-1"]["model"] == f"ft:{BASE}:org::ftjob-0"
    assert status.metadata["model_version"]["number"] == 2


async def test_a_job_may_start_from_the_base_again_and_versions_count_on():
    server = StandIn()
    adapter = backend(server)
    base = await adapter.current_version()
    await adapter.wait_until_complete(await adapter.submit(supervised("a")), poll_interval=0)
    await adapter.restore(base)
    status = await adapter.wait_until_complete(await adapter.submit(supervised("b")), poll_interval=0)
    assert server.jobs["ftjob-1"]["model"] == BASE
    assert status.metadata["model_version"]["number"] == 2


async def test_too_few_rows_are_told_before_anything_is_uploaded():
    server = StandIn()
    skipped = await backend(server).submit(supervised(rows=9))
    assert skipped == Skipped(reason="too little data: 9 rows, and the API takes 10 or more")
    assert server.files == {}


async def test_a_job_that_failed_says_why():
    adapter = backend(StandIn(ending="failed"))
    (*_, last) = await states(adapter, await adapter.submit(supervised()))
    assert last.status is TrainingStatusEnum.FAILED
    assert last.message == (
        "Code: invalid_training_file. Message: The job failed due to an invalid training file. "
        "Parameter: training_file."
    )


async def test_a_job_can_be_cancelled_and_one_that_is_over_stays_so():
    adapter = backend(StandIn())
    ref = await adapter.submit(supervised())
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


async def test_when_the_days_jobs_are_used_up_it_waits_and_does_not_upload_again():
    server = StandIn(daily_limits=3)
    await backend(server, daily_limit_wait=0.001).submit(supervised())
    assert (len(server.jobs), len(server.files)) == (1, 1)


async def test_the_wait_for_another_day_has_an_end():
    server = StandIn(daily_limits=9)
    with pytest.raises(TrainingError, match=r"used up at all 2 tries.*resume the run"):
        await backend(server, daily_limit_wait=0.001, daily_limit_tries=2).submit(supervised())


async def test_a_wrong_key_is_not_healthy_and_an_error_of_the_run():
    adapter = OpenAiJobs(OpenAiJobsConfig(), StandIn().client("sk-wrong"), BASE)
    assert not await adapter.is_healthy()
    assert await backend(StandIn()).is_healthy()
    with pytest.raises(TrainingError, match=r"AuthenticationError.*Incorrect API key"):
        await adapter.submit(supervised())


async def test_grpo_is_refused_before_anything_is_uploaded():
    server = StandIn()
    with pytest.raises(CapabilityError, match="'openai' can do: dpo, supervised"):
        await backend(server).submit(supervised().model_copy(update={"method": "grpo"}))
    assert server.requests == []


async def test_the_events_of_a_job_come_oldest_first(tmp_path):
    adapter = backend(StandIn())
    ref = await adapter.submit(supervised())
    events = await adapter.events(ref)
    assert [event.message for event in events[:2]] == ["Created fine-tuning job", "Fine-tuning job started"]
    adapter.log_progress(ref, {"step": 1}, str(tmp_path))
    assert (tmp_path / "openai_jobs.jsonl").read_text() == '{"run_id": "run-epoch-0", "step": 1}\n'
