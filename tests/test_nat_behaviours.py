"""The behaviours of the NeMo Agent Toolkit's own tests, as Etude has them.

Each test names a case of theirs: where Etude does the same it shows that, and where it does otherwise on
purpose (docs/from-nat.md says why) it shows what happens instead. Cases that other tests here have
already are not repeated; the page lists them.
"""

import asyncio
import json

import pytest
from pydantic import ValidationError

from etude.algorithms.samples import branches_of, sample_of
from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, FinetuneRunConfig
from etude.core.edge import trajectory_of
from etude.core.trajectory import EpisodeItem
from etude.integrations.art.wire import check_episode_order
from etude.loop.interface import Trainer
from tests.algorithms.scripted_episodes import call, conversation, episode
from tests.training import Run, examples


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


# Curriculum


@pytest.mark.parametrize(
    "keys", [{"min_reward_diff": -1}, {"random_subsample": 5.0}, {"random_subsample": 0}]
)
def test_curriculum_bounds_that_the_toolkit_does_not_check(keys):
    with pytest.raises(ValidationError):
        CurriculumLearningConfig(**keys)


# Builders


# Messages of an episode


def trajectories(*calls):
    record = episode(list(calls))
    return [trajectory_of(sample_of(one, record, 1.0)) for one in branches_of(record, ["*"], None)]


def roles(trajectory):
    return [str(item.role) for item in trajectory.episode]


def said(role, content):
    return {"role": role, "content": content}


def test_messages_repeated_word_for_word_are_not_taken_for_the_same():
    (one,) = trajectories(*conversation("try again", "no", "try again", "no"))
    assert [item.content for item in one.episode] == ["try again", "no", "try again", "no"]
    check_episode_order(one)


def test_messages_of_a_tool_stay_a_tools_with_the_id_of_its_call():
    first = conversation("q", "calling")[0]
    prompt = [said("user", "q"), said("assistant", "calling"), said("tool", "42") | {"tool_call_id": "c1"}]
    (one,) = trajectories(first, call(1, prompt, said("assistant", "42"), "<q>calling.42", "42."))
    assert roles(one) == ["user", "assistant", "tool", "assistant"]
    assert one.episode[2].metadata == {"tool_call_id": "c1"}
    check_episode_order(one)


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


async def test_trainer_cleanup_stops_what_is_being_collected(run):
    trainer = await run.start(num_epochs=1)
    waiting = asyncio.create_task(asyncio.sleep(600))
    trainer.trajectory_builder.evaluation_runs["late"] = waiting
    await trainer.cleanup()
    assert waiting.cancelled()


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


# Status
