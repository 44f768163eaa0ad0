"""The shared model group on an adapter of this process: its jobs, its state and its agents."""

import asyncio
import re

import pytest

from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.backends.trainer_adapter import Capabilities, JobHyperparameters
from etude.core.errors import CapabilityError, EngineError, RequestError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.groups import (
    DryRun,
    Frozen,
    GroupAgent,
    ModelSettings,
    OpenAiSharedModelGroup,
    SharedModelGroup,
    Skipped,
    Step,
    agents_of_model,
)
from etude.protocols import adp, nip
from tests.algorithms.scripted_episodes import conversation, episode
from tests.backends.openai_stand_in import BASE
from tests.groups.conftest import have_say, train
from tests.training import FakeAdapter, Interrupted, interrupt, version


async def test_the_lineage_says_what_made_each_version(make, plays):
    made = make(protocol=adp())
    version = await train(made, plays)
    assert (version.number, made.engine.version, made.group.model_name) == (1, 1, "weights-1")
    assert await made.group.get_fine_tune_job_status() == "succeeded"
    right, wrong = plays
    await made.group.create_grpo_fine_tune_job({"verifier": [right, wrong]}, job_name="second")
    await made.group.switch_to_next_model()
    first, second = made.group.lineage()
    assert [(one.version.number, one.data.parent, one.data.method) for one in (first, second)] == [
        (1, 0, "supervised"),
        (2, 1, "grpo"),
    ]
    assert second.job.run_id == "second"
    assert second.metrics == {"loss": 1.0, "trajectories": 2}
    assert first.data.data_hash != second.data.data_hash


async def test_a_group_that_starts_from_scratch_starts_each_job_from_the_base(make, plays):
    made = make(fine_tune_from_scratch=True)
    await train(made, plays)
    await made.imitate(plays[0])
    assert (await made.adapter.current_version()).number == 0
    assert made.group.jobs.log.state.plans[made.group.get_state().fine_tune_job_id].parent == 0


async def test_the_state_survives_the_process(made, plays):
    await train(made, plays)
    again = made.again()
    assert again.group.get_state() == made.group.get_state()
    await again.group.wait_for_ready()
    assert again.group.get_state() == made.group.get_state()
    assert (again.engine.version, again.group.model_name) == (1, "weights-1")
    assert await again.group.switch_to_next_model() == made.group.jobs.version


async def test_a_switch_that_was_killed_half_way_is_made_whole(made, plays, monkeypatch):
    await made.imitate(plays[0])
    monkeypatch.setattr(made.group, "_keep", interrupt)
    with pytest.raises(Interrupted):
        await made.group.switch_to_next_model()
    again = made.again()
    await again.group.wait_for_ready()
    assert again.engine.version == 0
    assert (await again.group.switch_to_next_model()).number == 1
    assert len(again.group.lineage()) == 1


async def test_a_switch_that_fails_leaves_everything_as_it_was(made, plays):
    await made.imitate(plays[0])
    before, adopt = made.group.get_state(), made.engine.adopt

    async def fail(version):
        await adopt(version)
        if version.number:
            raise EngineError("the weights do not fit")

    made.engine.adopt = fail
    with pytest.raises(EngineError, match="do not fit"):
        await made.group.switch_to_next_model()
    assert (made.engine.version, made.group.model_name, made.group.lineage()) == (0, BASE, [])
    assert made.group.get_state() == before


async def test_a_job_of_the_same_data_is_the_same_job_until_it_fails(made, plays):
    first = await made.imitate(plays[0])
    assert await made.imitate(plays[0]) == first
    have_say(made.adapter, status=TrainingStatusEnum.FAILED, message="out of memory")
    assert made.group.jobs.log.state.newest_number == 1
    assert await made.group.get_fine_tune_job_status() == "failed"
    assert made.group.jobs.log.state.newest_number == 0
    assert await made.group.fine_tune_job_failed()
    assert await made.group.get_fine_tune_job_error_repr() == "out of memory"
    with pytest.raises(TrainingError, match="ended as 'failed': out of memory"):
        await made.group.switch_to_next_model()
    second = await made.imitate(plays[0])
    third = await made.imitate(plays[0])
    assert (second.run_id, third.run_id) == (f"{first.run_id}-retry-1", f"{first.run_id}-retry-2")


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"freeze_agent": True}, Frozen, "model 'policy' is frozen"),
        ({"min_rows": 10}, Skipped, r"1 rows, .*\b10\b"),
        ({"dry_run": True}, DryRun, "dry run"),
    ],
)
async def test_what_is_not_submitted_is_told_by_its_type(make, plays, settings, kind, reason):
    made = make(**settings)
    await made.group.wait_for_ready()
    result = await made.imitate(plays[0])
    assert type(result) is kind and re.search(reason, result.reason)
    assert made.adapter.submitted == []
    # It is neither a success nor a failure, and nothing changes.
    assert await made.group.get_fine_tune_job_status() == "not_found"
    assert not await made.group.fine_tune_job_failed()
    assert await made.group.get_fine_tune_job_error_repr() == result.reason
    assert (await made.group.switch_to_next_model()).number == 0
    assert made.group.is_trainable == (kind is not Frozen)


async def test_without_any_job_there_is_nothing_to_switch_to(made):
    group = made.group
    assert await group.get_fine_tune_job_status() == "not_found"
    assert "no job was" in await group.get_fine_tune_job_error_repr()
    with pytest.raises(TrainingJobNotFoundClientError):
        await group.switch_to_next_model()
    with pytest.raises(TrainingJobNotFoundClientError):
        await group._get_openai_fine_tune_job()


async def test_a_group_that_does_not_get_ready_says_so(made):

    async def away():
        return False

    made.adapter.is_healthy = away
    with pytest.raises(TimeoutError, match=r"group 'pair' .*ready after 0.01 s"):
        await made.group.wait_for_ready(timeout=0.01)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"iteration": 3}, r"a group: (.|\n)*iteration\n  Extra inputs"),
        ({"version": {"number": 1}}, r"a group: (.|\n)*version\.location\n  Field required"),
        ("ft:x", r"a group: (.|\n)*valid dictionary"),
        (
            {"version": {"number": 1, "location": "x", "digest": "y"}},
            "version 1 of group 'pair' is weights-1, .* x:",
        ),
    ],
)
async def test_a_state_that_is_none_or_another_groups_changes_nothing(made, plays, state, problem):
    await train(made, plays)
    before = made.group.get_state()
    with pytest.raises(RequestError, match=problem):
        made.group.set_state(state)
    assert made.group.get_state() == before


async def test_a_line_of_another_model_is_an_error_that_names_both(made, plays):
    group = made.group
    group.jobs.model = "polcy"
    steps = [{"prover": [Step(play, 0)]} for play in plays]
    for create in (
        group.create_supervised_fine_tune_job({"prover": plays}),
        group.create_grpo_fine_tune_job({"prover": plays}),
        group.create_dpo_fine_tune_job(*steps),
        group.create_supervised_fine_tune_job({}, {"verifier": plays}),
    ):
        with pytest.raises(RequestError, match=r"of the model 'polcy', and agent '.*' answered with"):
            await create


async def test_a_backend_that_gives_a_number_twice_is_found_out(made, plays):
    entries = await made.train_twice(plays)
    # The fake adapter counts from where it starts, and its digests go by numbers.
    have_say(made.adapter, version=version(2).model_copy(update={"digest": "other"}))
    await made.group.create_supervised_fine_tune_job({"prover": [plays[0]], "verifier": [plays[1]]})
    with pytest.raises(TrainingError, match=r"made version 2 .*, but job .* already made"):
        await made.group.switch_to_next_model()
    assert made.group.lineage() == entries
    assert made.group.jobs.version.number == 1


async def test_a_backend_without_a_way_back_says_so(make, tmp_path, plays):
    adapter = FakeAdapter(tmp_path / "backend", capabilities=Capabilities(versions=True))
    made = make(adapter=adapter)
    await made.train_twice(plays)
    with pytest.raises(CapabilityError, match="starts from version 1"):
        await made.imitate(plays[0], job_name="back")
    assert "back" not in adapter.submitted


async def test_a_job_that_fails_is_late_or_not_over_says_what_to_do(made, plays):
    await made.imitate(plays[0])
    made.adapter.behave = lambda status: status.model_copy(update={"status": TrainingStatusEnum.FAILED})
    with pytest.raises(TrainingError, match=r"ended as 'failed'\. .* the same data"):
        await made.group.wait_for_fine_tune_job(poll_interval=0)
    made.adapter.behave = lambda status: asyncio.sleep(60)
    with pytest.raises(TrainingError, match=r"larger `job_timeout` \(for a group: `timeout`\)"):
        await made.group.wait_for_fine_tune_job(timeout=0.01)
    have_say(made.adapter, status=TrainingStatusEnum.RUNNING)
    with pytest.raises(TrainingError, match="status is 'running'"):
        await made.group.switch_to_next_model()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_epochs": 0}, "num_epochs: .* equal to 1, found 0"),
        ({"num_epochs": 1.5}, "num_epochs: .* valid integer"),
        ({"min_rows": True}, "min_rows: .* valid integer"),
        ({"lora_rank": -1}, "lora_rank: "),
        ({"dpo_beta": 0}, "dpo_beta: "),
        ({"rl_learning_rate": float("nan")}, "rl_learning_rate: .* finite number"),
        ({"rl_learning_rate": "1e-4"}, "rl_learning_rate: .* valid number"),
        ({"lora_alpha_scale": 2.0}, "lora_alpha_scale .*multiple of lora_rank"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(settings, message):
    with pytest.raises(RequestError, match=message):
        ModelSettings(BASE, **settings)


def test_the_attributes_are_those_of_the_agents_and_the_protocol(make):
    settings = ModelSettings("tiny", num_epochs=3, rl_learning_rate=1e-4, lora_rank=16, lora_alpha_scale=1.5)
    protocol = nip(max_message_rounds=5)
    agents = agents_of_model(protocol, {"prover": "other", "verifier": "policy"}, "policy", "pair", settings)
    group = OpenAiSharedModelGroup("pair", agents, make().group.jobs, protocol)
    assert isinstance(group, SharedModelGroup)
    assert (group.num_epochs, group.rl_learning_rate, group.lora_alpha) == (3, 1e-4, 24)
    assert group.jobs.adapter.hyperparameters == JobHyperparameters(3, 1e-4, None, 16, 24.0)
    assert (group.max_message_rounds, group.model_name, group.is_trainable) == (5, "tiny", True)
    # An agent's id is its place in the protocol, whatever others are in the group.
    names = list(protocol.agents)
    assert list(group.agent_ids_and_names()) == [(names.index("verifier"), "verifier")]
    assert group.agent_wholes["verifier"].may_decide
    assert make().group.lora_alpha is None
    with pytest.raises(RequestError, match="plays no protocol"):
        _ = make(protocol=None).group.max_message_rounds
    assert group.training_client_type == "adapter"
    with pytest.raises(CapabilityError, match="language-model server"):
        _ = group.language_model_client


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([("a", {}), ("b", {"num_epochs": 2})], "on num_epochs, .*None for 'a' and 2 for 'b'"),
        ([("a", {}), ("b", {"lora_rank": 8})], "must agree on lora_rank"),
        ([("a", {}), ("a", {})], "two agents called 'a'"),
        ([], "has no agents"),
        ([("a", {})], "protocol 'adp' has no agent 'a'"),
    ],
)
def test_agents_of_a_group_must_agree(make, agents, message):
    made = [GroupAgent(name, ModelSettings(BASE, **settings), "pair") for name, settings in agents]
    with pytest.raises(RequestError, match=message):
        OpenAiSharedModelGroup("pair", iter(made), make().group.jobs, adp())
    with pytest.raises(RequestError, match=r"agent 'a' .*group 'a', not to 'pair'"):
        OpenAiSharedModelGroup("pair", [GroupAgent("a", ModelSettings(BASE))], make().group.jobs)


async def test_data_of_strangers_and_steps_that_do_not_fit_are_refused(made, plays):
    group, (right, wrong) = made.group, plays
    supervised, dpo = group.create_supervised_fine_tune_job, group.create_dpo_fine_tune_job
    for job, message in (
        (supervised({"judge": [right]}), "has no agent 'judge'; agents: "),
        (supervised({}, {"prover": [right]}), "'prover' is not a"),
        (dpo({"prover": [Step(right, 1)]}, {"prover": [Step(wrong, 1)]}), "turn of 'verifier'"),
        (dpo({"verifier": [Step(right, 1)]}, {"verifier": [Step(wrong, 1)]}), "answer different prompts"),
        (dpo({"prover": [Step(right, 0)]}, {"prover": []}), "1 positive and 0 negative"),
        (dpo({"prover": [Step(right, 0)]}, {}), "positive .*prover, .*negative .*nobody"),
    ):
        with pytest.raises(RequestError, match=message):
            await job
    with pytest.raises(RequestError, match="no answered call 7"):
        _ = Step(right, 7).recorded_call


async def test_an_agent_that_plays_no_protocol_needs_rewards_for_grpo(make):
    group = make(protocol=None).group
    records = [episode(conversation("q", f"a{n}"), generation=n) for n in range(2)]
    await group.wait_for_ready()
    with pytest.raises(RequestError, match=r"'train/1/e/0' is None, .*; give it in `rewards`"):
        await group.create_grpo_fine_tune_job({"agent": records})
    for reward in (float("inf"), float("nan"), "high", None, [1.0], 10**400):
        with pytest.raises(RequestError, match=r"reward of episode 'train/1/e/0' .*not a finite"):
            await group.create_grpo_fine_tune_job({"agent": records}, {records[0].id: reward})
    rewards = {record.id: float(record.generation) for record in records}
    await group.create_grpo_fine_tune_job({"agent": records}, rewards)
    await group.train()
    assert (await group.switch_to_next_model()).number == 1
