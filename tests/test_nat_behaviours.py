"""The behaviours of the NeMo Agent Toolkit's own tests, as Etude has them.

Each test names a case of theirs: where Etude does the same it shows that, and where it does otherwise on
purpose (docs/from-nat.md says why) it shows what happens instead. Cases that other tests here have
already are not repeated; the page lists them.
"""

import asyncio
import json

import pytest
from pydantic import ValidationError

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.dpo import Dpo
from etude.algorithms.episodes import Tally
from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import branches_of, sample_of
from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, FinetuneRunConfig
from etude.core.edge import trajectory_of
from etude.core.errors import ErrorBudgetExceeded, RequestError, TrainingError
from etude.core.evaluation import EvalOutputItem
from etude.core.job import TrainingStatusEnum
from etude.core.trajectory import DPOItem, EpisodeItem, Trajectory
from etude.integrations.art.wire import check_episode_order
from etude.loop.curriculum import apply, initial_state
from etude.loop.interface import Trainer
from tests.algorithms.scripted_episodes import call, conversation, episode, group
from tests.algorithms.test_collecting import evaluated, finish, make_builder, siblings
from tests.support import ScriptedEngine
from tests.training import Interrupted, Run, examples, interrupt


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


# Curriculum


def single(*rewards):
    """Groups of one trajectory each."""
    item = EpisodeItem(role="assistant", content="x", logprobs=())
    return [[Trajectory(episode=[item], reward=reward, example_id=str(reward))] for reward in rewards]


def curriculum(**keys):
    return CurriculumLearningConfig(enabled=True, min_reward_diff=0, **keys)


def test_curriculum_enabled_half_of_four_groups_are_the_two_easiest():
    settings = curriculum(initial_percentile=0.5)
    kept, state, _ = apply(single(0.2, 0.8, 0.5, 0.9), initial_state(settings), settings, 0, 0)
    assert [one.reward for (one,) in kept] == [0.9, 0.8]
    assert (state["total_groups"], state["current_percentile"]) == (4, 0.5)


def test_curriculum_expansion_from_a_quarter_to_a_half_after_two_epochs():
    settings = curriculum(initial_percentile=0.25, increment_percentile=0.25, expansion_interval=2)
    state, sizes = initial_state(settings), []
    for epoch in range(4):
        kept, state, _ = apply(single(0.1, 0.2, 0.3, 0.4), state, settings, 0, epoch)
        sizes.append(len(kept))
    assert sizes == [1, 1, 2, 2]
    assert state["last_expansion_epoch"] == 2


def test_curriculum_single_group_half_of_ten_trajectories_are_five():
    settings = curriculum(random_subsample=0.5)
    (kept,), state, _ = apply(
        [[one for (one,) in single(*range(10))]], initial_state(settings), settings, 0, 0
    )
    assert len(kept) == 5
    assert state == initial_state(settings)


def test_curriculum_no_variance_leaves_nothing():
    settings = CurriculumLearningConfig(enabled=True)
    kept, state, _ = apply([single(0.5)[0] * 2, single(0.7)[0] * 2], initial_state(settings), settings, 0, 0)
    assert kept == []
    assert state["current_percentile"] == 0.3


def test_curriculum_state_at_the_start_is_the_initial_percentile_and_no_expansion():
    state = initial_state(curriculum(initial_percentile=0.4))
    assert (state["current_percentile"], state["last_expansion_epoch"]) == (0.4, -1)
    assert (state["total_groups"], list(state["included_groups"])) == (0, [])
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    "keys", [{"min_reward_diff": -1}, {"random_subsample": 5.0}, {"random_subsample": 0}]
)
def test_curriculum_bounds_that_the_toolkit_does_not_check(keys):
    with pytest.raises(ValidationError):
        CurriculumLearningConfig(**keys)


# Builders


async def test_builder_single_generation_is_no_flat_group_of_the_whole_dataset():
    output = evaluated(*siblings(1.0, example="a"), *siblings(0.0, example="b"))
    collection = await finish(make_builder(num_generations=1, drop_flat_groups=False), output)
    assert [len(group) for group in collection.trajectories] == [1, 1]
    with pytest.raises(RequestError, match="num_generations: 1 makes groups of one episode"):
        await CollectingBuilder(Grpo(num_generations=1)).initialize(make_builder().run_config)


async def test_builder_grouping_is_by_example_across_generations():
    output = evaluated(*siblings(1.0, 0.0, 0.5, example="a"), *siblings(0.0, 1.0, example="b"))
    collection = await finish(make_builder(), output)
    assert [[one.metadata["generation"] for one in group] for group in collection.trajectories] == [
        [0, 1, 2],
        [0, 1],
    ]


async def test_builder_without_reward_results_is_an_error_and_not_an_empty_collection():
    with pytest.raises(RequestError, match="'correct' is not among the evaluators that ran"):
        await finish(make_builder(), evaluated(*siblings(1.0), evaluator="another"))


async def test_builder_calls_of_other_functions_make_no_trajectory():
    collection = await finish(make_builder(), evaluated(*siblings(1.0, 0.0, function="tool")))
    assert collection.trajectories == []


async def test_builder_a_run_is_forgotten_once_it_is_finalized():
    builder = make_builder()
    await finish(builder, evaluated(*siblings(1.0, 0.0)))
    assert builder.evaluation_runs == {}
    with pytest.raises(ValueError, match="No evaluation runs found"):
        await builder.finalize("run")


@pytest.mark.parametrize(("score", "reward"), [(0.75, 0.75), (1, 1.0)])
async def test_builder_compute_reward_is_the_score_whatever_the_meta(score, reward):
    builder = make_builder()
    item = EvalOutputItem(id="e", generation=0, score=score)
    assert await builder.compute_reward(item) == await builder.compute_reward(item, {"x": 1}) == reward


async def test_builder_a_missing_score_is_no_reward_of_zero():
    collection = await finish(make_builder(), evaluated(*siblings(1.0, None, 0.0)))
    assert [one.reward for group in collection.trajectories for one in group] == [1.0, 0.0]


# Messages of an episode


def trajectories(*calls):
    record = episode(list(calls))
    return [trajectory_of(sample_of(one, record, 1.0)) for one in branches_of(record, ["*"], None)]


def roles(trajectory):
    return [str(item.role) for item in trajectory.episode]


def said(role, content):
    return {"role": role, "content": content}


def test_messages_alternating_are_kept_in_their_order():
    (one,) = trajectories(*conversation("a", "b", "c", "d"))
    assert roles(one) == ["user", "assistant", "user", "assistant"]


def test_messages_repeated_word_for_word_are_not_taken_for_the_same():
    (one,) = trajectories(*conversation("try again", "no", "try again", "no"))
    assert [item.content for item in one.episode] == ["try again", "no", "try again", "no"]
    check_episode_order(one)


def test_messages_before_the_first_answer_are_not_run_together():
    before = [said("system", "s"), said("user", "u"), said("tool", "t")]
    (one,) = trajectories(call(0, before, said("assistant", "a"), "<", "a."))
    assert roles(one) == ["system", "user", "tool", "assistant"]


def test_messages_of_a_tool_stay_a_tools_with_the_id_of_its_call():
    first = conversation("q", "calling")[0]
    prompt = [said("user", "q"), said("assistant", "calling"), said("tool", "42") | {"tool_call_id": "c1"}]
    (one,) = trajectories(first, call(1, prompt, said("assistant", "42"), "<q>calling.42", "42."))
    assert roles(one) == ["user", "assistant", "tool", "assistant"]
    assert one.episode[2].metadata == {"tool_call_id": "c1"}
    check_episode_order(one)


def test_messages_without_content_are_kept():
    (one,) = trajectories(call(0, [said("user", "")], said("assistant", ""), "<", "."))
    assert [item.content for item in one.episode] == ["", ""]


def test_messages_that_an_agent_changed_afterwards_start_a_branch_and_lose_nothing():
    shortened = [said("user", "q"), said("assistant", "short"), said("user", "go on")]
    later = call(1, shortened, said("assistant", "done"), "<q>short<go on>", "done.")
    made = trajectories(*conversation("q", "a long answer"), later)
    assert [roles(one)[-1] for one in made] == ["assistant", "assistant"]
    assert sum(len(item.token_ids or ()) for one in made for item in one.episode) == len(
        "a long answer.done."
    )


def test_messages_from_the_assistant_need_logprobs():
    with pytest.raises(ValidationError, match="logprobs must be provided for assistant role"):
        EpisodeItem(role="assistant", content="x")


# Trainer


async def test_trainer_without_trajectories_skips_the_epoch_and_fails_a_run_of_such(run):
    run.evaluator = lambda example, output: 1.0
    with pytest.raises(TrainingError, match="nothing"):
        await run.start(num_epochs=2)
    assert run.adapter.submitted == []


async def test_trainer_failed_epoch_ends_the_run_as_an_error_with_the_message(run):
    run.adapter.behave = lambda found: found.model_copy(
        update={"status": TrainingStatusEnum.FAILED, "message": "CUDA out of memory"}
    )
    with pytest.raises(TrainingError, match="ended as 'failed': CUDA out of memory"):
        await run.start(num_epochs=3)
    assert len(run.adapter.submitted) == 1


async def test_trainer_multiple_epochs_have_a_completed_status_each_and_a_job_of_their_own(run):
    await run.start(num_epochs=3)
    assert [(one.run_id, one.status, one.progress) for one in run.statuses] == [
        (f"run-epoch-{epoch}", TrainingStatusEnum.COMPLETED, None) for epoch in (1, 2, 3)
    ]


async def test_trainer_log_progress_writes_metrics_and_reward_history(run, tmp_path):
    trainer = await run.start(num_epochs=2)
    trainer.log_progress(1, {}, str(tmp_path / "logs"))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "training_metrics.jsonl").open()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert {"timestamp", "run_id", "avg_reward", "num_trajectories", "num_groups"} <= lines[0].keys()
    history = json.loads((tmp_path / "logs" / "reward_history.json").read_text())
    wanted = {"epoch", "timestamp", "avg_reward", "min_reward", "max_reward", "num_trajectories"}
    assert wanted <= history[0].keys()


async def test_trainer_validation_metrics_are_those_of_the_rewards(run):
    run.validation = examples(4, "v")
    run.finetuning.run_configuration = FinetuneRunConfig(validation_interval=1)
    trainer = await run.start(num_epochs=1)
    first = trainer.history.validations[0].metrics
    assert first["num_examples"] == 4
    assert 0 <= first["min_reward"] <= first["avg_reward"] <= first["max_reward"] <= 1
    assert first["dataset_type"] == "validation"


async def test_trainer_failed_validation_is_an_error_and_no_reward_of_zero(run):
    run.validation = examples(4, "v")
    run.engine = ScriptedEngine([RuntimeError("the endpoint is away")])
    with pytest.raises(ErrorBudgetExceeded):
        await run.start(num_epochs=1)


async def test_trainer_cleanup_stops_what_is_being_collected(run):
    trainer = await run.start(num_epochs=1)
    waiting = asyncio.create_task(asyncio.sleep(600))
    trainer.trajectory_builder.evaluation_runs["late"] = waiting
    await trainer.cleanup()
    assert waiting.cancelled()


async def test_trainer_a_restart_does_not_start_over(run):
    run.adapter.behave = interrupt
    with pytest.raises(Interrupted):
        await run.start(num_epochs=2)
    again = run.restarted()
    await again.start(num_epochs=2)
    assert [one.run_id for one in again.statuses] == ["run-epoch-1", "run-epoch-2"]
    assert again.adapter.submitted == ["run-epoch-2"]


@pytest.mark.parametrize("interface", [Trainer, TrainerAdapter, TrajectoryBuilder])
def test_the_interfaces_cannot_be_made_as_they_are(interface):
    with pytest.raises(TypeError, match="abstract"):
        interface(None)


def test_finetuning_block_starts_with_the_toolkits_defaults():
    block = FinetuneConfig()
    assert (block.enabled, block.num_epochs, block.target_functions) == (False, 1, ["<workflow>"])
    learning = block.curriculum_learning
    assert (learning.initial_percentile, learning.increment_percentile) == (0.3, 0.2)
    assert (learning.expansion_interval, learning.min_reward_diff, learning.sort_ascending) == (5, 0.1, False)
    with pytest.raises(ValidationError):
        FinetuneConfig(num_epochs=0)


# DPO pairs


def dpo_pairs(*rewards, **settings):
    made = group(*((reward, f"answer {place}") for place, reward in enumerate(rewards)))
    return [*map(trajectory_of, Dpo(**settings).samples(made, Tally()))]


def test_dpo_exhaustive_pairs_of_three_are_three_by_falling_difference():
    found = dpo_pairs(0.5, 0.9, 0.1)
    assert [round(one.reward, 9) for one in found] == [0.8, 0.4, 0.4]


def test_dpo_best_against_worst_is_one_pair():
    (one,) = dpo_pairs(0.9, 0.7, 0.5, pairs="best_vs_worst")
    assert (one.metadata["chosen_reward"], one.metadata["rejected_reward"]) == (0.9, 0.5)


def test_dpo_least_difference_leaves_two_of_three():
    assert len(dpo_pairs(0.9, 0.85, 0.1, min_reward_diff=0.1)) == 2


def test_dpo_most_pairs_of_a_prompt():
    assert len(dpo_pairs(0.9, 0.5, 0.1, 0.0, max_pairs_per_group=2)) == 2


def test_dpo_single_candidate_is_no_pair():
    assert dpo_pairs(0.9) == []


def test_dpo_ties_are_no_pairs_although_the_toolkit_makes_them():
    assert dpo_pairs(0.5, 0.5) == []


def test_dpo_item_has_the_prompt_as_messages_and_keeps_what_came_with_them():
    (one,) = dpo_pairs(0.9, 0.5)
    (item,) = one.episode
    assert isinstance(item, DPOItem)
    assert [message.to_wire() for message in item.prompt] == [{"role": "user", "content": "question"}]
    assert (item.chosen_response, item.rejected_response) == ("answer 0", "answer 1")


# Status


async def test_status_of_a_finished_job_can_be_asked_for_again_and_again(run):
    await run.start(num_epochs=1)
    ref_status = run.statuses[0]
    again = await run.adapter.status(ref_status)
    assert again == await run.adapter.status(ref_status)
    assert again.status is TrainingStatusEnum.COMPLETED


async def test_status_of_an_unknown_job_is_not_found_and_final(run):
    from etude.core.job import TrainingJobRef

    status = await run.adapter.status(TrainingJobRef(run_id="nobody", backend="fake"))
    assert status.status is TrainingStatusEnum.NOT_FOUND
    assert status.status.is_final
    assert not TrainingStatusEnum.RUNNING.is_final
