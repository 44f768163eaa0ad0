"""The shared model group at OpenAI and at a language-model server."""

import re

import pytest

from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.core.errors import CapabilityError, TrainingError
from etude.groups import Step
from etude.protocols import adp
from etude.store.journal import Journal
from tests.algorithms.scripted_episodes import play_out
from tests.backends.lm_stand_in import LmStandIn
from tests.backends.openai_stand_in import BASE, StandIn
from tests.backends.test_openai_jobs import backend
from tests.groups.conftest import ACCEPT, REJECT, Made, train


@pytest.fixture
def server():
    """A stand-in of OpenAI."""
    return StandIn(min_rows=1)


async def test_the_rows_of_dpo_are_the_steps_that_were_paired(tmp_path, make, server):
    made = make(adapter=backend(server, min_rows=1))
    tree = await play_out(tmp_path, adp(), ["good", "bad", "bad", ACCEPT], widths={"prover": 3})
    steps = {"prover": [Step(tree, 0), Step(tree, 1)]}, {"prover": [Step(tree, 1), Step(tree, 2)]}
    await made.group.create_dpo_fine_tune_job(*steps)
    # The second pair has equal answers.
    assert server.rows("ftjob-0") == [
        {
            "input": {
                "messages": [
                    {"role": "system", "content": "You are prover. e"},
                    {"role": "user", "content": "Decide now."},
                ]
            },
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad"}],
        }
    ]


async def test_a_replaced_guess_is_the_truth_in_the_row(make, server, plays):
    made = make(adapter=backend(server, min_rows=1))
    right, wrong = plays
    await made.group.create_supervised_fine_tune_job({"prover": [right]}, {"verifier": [wrong]})
    prover, verifier = (row["messages"] for row in server.rows("ftjob-0"))
    assert [message["content"] for message in prover] == ["You are prover. e", "Decide now.", "proof"]
    assert verifier[0]["content"] == "You are verifier. e"
    assert "lie" in verifier[1]["content"]
    assert verifier[2] == {"role": "assistant", "content": REJECT}


async def test_a_group_at_openai_goes_through_its_states_and_to_its_next_model(make, server, plays):
    made = make(adapter=backend(server, min_rows=1))
    group = made.group
    assert group.training_client_type == "openai"
    assert group.openai_client is made.adapter.client
    await group.wait_for_ready()
    await group.create_supervised_fine_tune_job({"prover": [plays[0]]}, job_name="run_iter_0_pair")
    states = [await group.get_fine_tune_job_status() for _ in range(4)]
    assert states == ["pending", "pending", "running", "succeeded"]
    await group.switch_to_next_model()
    assert group.model_name == made.engine.location == f"ft:{BASE}:org::ftjob-0"
    assert (await group._get_openai_fine_tune_job()).fine_tuned_model == group.model_name
    with pytest.raises(TrainingError, match="train through 'lm_server'"):
        await group._get_lm_server_fine_tune_job()
    with pytest.raises(CapabilityError, match="dpo, supervised"):
        await group.create_grpo_fine_tune_job({"prover": [plays[0]]})


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
async def test_a_job_that_ended_badly_at_openai(make, plays, ending):
    made = make(adapter=backend(StandIn(ending=ending, min_rows=1), min_rows=1))
    await made.imitate(plays[0])
    with pytest.raises(TrainingError):
        await made.group.wait_for_fine_tune_job(poll_interval=0)
    assert await made.group.get_fine_tune_job_status() == ending
    assert await made.group.fine_tune_job_failed()
    error = await made.group.get_fine_tune_job_error_repr()
    said = r"Code: invalid_training_file\. Message: .+\. Parameter: training_file\."
    assert bool(re.fullmatch(said, error)) == (ending == "failed")


@pytest.mark.parametrize("free_engine", [True, False])
async def test_a_language_model_server_makes_room_for_training_where_it_is_to(
    make, plays, monkeypatch, free_engine
):
    monkeypatch.setattr("etude.backends.lm_server._POLL", 0.0)
    server = LmStandIn()
    server.faults["GET /health"] = ["lost", 503]
    adapter = server.adapter(free_engine=free_engine)
    group = make(adapter=adapter).group
    assert group.training_client_type == "lm_server"
    assert group.language_model_client is adapter.server
    await group.wait_for_ready(timeout=60)
    assert server.count("GET /version") == 1
    await group.eval()
    assert server.engine == ["start"]
    await group.create_supervised_fine_tune_job({"prover": list(plays)}, job_name="job")
    assert server.engine == ["start", *["away"] * free_engine]
    await group.wait_for_fine_tune_job(poll_interval=0)
    version = await group.switch_to_next_model()
    assert server.engine == ["start", *["away", "back", "start"] * free_engine]
    await group.train()
    assert server.status["status"] == ("stopped" if free_engine else "running")
    await group.eval()
    assert server.status["status"] == "running"
    assert group.model_name == version.location == "ft:gpt-4o-mini-2024-07-18:org::ftjob-0"
    assert (await group._get_lm_server_fine_tune_job()).status == "succeeded"
    with pytest.raises(TrainingError, match="train through 'openai'"):
        await group._get_openai_fine_tune_job()


@pytest.mark.parametrize("settings", [{"freeze_agent": True}, {"dry_run": True}, {"min_rows": 9}])
async def test_what_submits_nothing_leaves_the_servers_engine_alone(make, plays, settings):
    server = LmStandIn()
    made = make(adapter=server.adapter(free_engine=True), **settings)
    await made.group.wait_for_ready(timeout=60)
    await made.imitate(plays[0])
    if "min_rows" not in settings:
        await made.group.train()
    assert "away" not in server.engine


async def test_a_job_that_a_server_forgot_is_not_found_by_its_name(make, plays):
    server = LmStandIn()
    group = make(adapter=server.adapter()).group
    await group.wait_for_ready(timeout=60)
    await group.create_supervised_fine_tune_job({"prover": [plays[0]]})
    server.jobs.clear()
    assert await group.get_fine_tune_job_status() == "not_found"
    assert await group.fine_tune_job_failed()
    with pytest.raises(TrainingJobNotFoundClientError, match="ftjob-0"):
        await group._get_lm_server_fine_tune_job()


async def test_a_group_goes_on_from_a_state_in_another_journal(tmp_path, make, server, plays):
    first = make(adapter=backend(server, min_rows=1))
    made = await train(first, plays)
    with Journal(tmp_path / "other.db") as other:
        second = Made(tmp_path, other, adapter=backend(server, min_rows=1))
        second.group.set_state(first.group.get_state_dict())
        await second.group.eval()
        assert (second.group.model_name, second.engine.version) == (made.location, 1)
        assert await second.group.get_fine_tune_job_status() == "succeeded"
        assert await second.group.switch_to_next_model() == made
        assert (await train(second, plays[::-1])).number == 2
        former, latter = second.group.lineage()
    assert (former.version, former.data, latter.data.parent) == (made, None, 1)
    assert server.jobs["ftjob-1"]["model"] == made.location
