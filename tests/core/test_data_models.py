"""The values of the interfaces, as code that was written for the toolkit's guide makes and changes them."""

import math
import uuid
from typing import Any

import numpy
import pytest
from pydantic import ValidationError

from etude.config.finetuning import (
    CurriculumLearningConfig,
    FinetuneConfig,
    FinetuneRunConfig,
    RewardFunctionConfig,
    TrainerConfig,
)
from etude.core.episode import Example
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.message import OpenAIMessage
from etude.core.records import JobEnded
from etude.core.sample import TrajectoryCollection
from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory

USER = {"role": "user", "content": "2 + 2"}
STATUS = {"run_id": "r", "backend": "b", "status": "running"}


@pytest.mark.parametrize(
    ("value", "field", "assigned", "wrong"),
    [
        (Trajectory(episode=[EpisodeItem(**USER)], reward=0), "reward", 0.5, math.nan),
        (EpisodeItem(**USER), "content", "3 + 3", None),
        (DPOItem(prompt="p", chosen_response="a", rejected_response="b"), "chosen_response", "c", 1),
        (TrajectoryCollection(run_id="r"), "trajectories", [[]], None),
        (OpenAIMessage(role="user", content="x"), "content", "y", 1),
        (TrainingJobRef(run_id="r", backend="b"), "metadata", {"job_id": "1"}, "x"),
        (TrainingJobStatus(**STATUS), "status", TrainingStatusEnum.COMPLETED, "gone"),
        (EvalInputItem(id="1"), "output_obj", "4", None),
        (EvalOutputItem(id="1"), "score", 0.5, "0.5"),
        (CurriculumLearningConfig(), "initial_percentile", 0.5, 0),
        (FinetuneConfig(), "num_epochs", 3, 0),
        (TrainerConfig(), "reward", RewardFunctionConfig(name="a"), "a"),
    ],
)
def test_fields_may_be_assigned_and_are_checked_and_others_are_errors(
    value: Any, field: str, assigned: Any, wrong: Any
) -> None:
    setattr(value, field, assigned)
    assert getattr(value, field) == assigned
    if wrong is not None:
        with pytest.raises(ValidationError):
            setattr(value, field, wrong)
        assert getattr(value, field) == assigned
    if not isinstance(value, OpenAIMessage):
        with pytest.raises(ValidationError, match="expected_trajectory"):
            type(value).model_validate({**dict(value), "expected_trajectory": [1]})


def test_an_assignment_that_breaks_a_rule_of_the_whole_leaves_the_value_as_it_was() -> None:
    item = EpisodeItem(**USER)
    with pytest.raises(ValidationError, match=r"logprobs .*assistant role"):
        item.role = EpisodeItemRole.ASSISTANT
    assert item == EpisodeItem(**USER)
    item.logprobs = [-0.5]
    item.role = EpisodeItemRole.ASSISTANT
    assert item.role == "assistant"


def test_a_message_keeps_fields_that_only_its_provider_knows() -> None:
    message = OpenAIMessage(role="assistant", content=None, tool_calls=[{"id": "1"}])
    assert message.to_wire() == {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize("given", [1, "1", numpy.int64(1)])
def test_an_id_is_text_whatever_it_was_given_as(given: Any) -> None:
    assert EvalInputItem(id=given).id == EvalOutputItem(id=given).id == Example(given).id == "1"
    item = EvalOutputItem(id="0")
    item.id = given
    assert item == EvalOutputItem(id="1")


def test_other_names_are_their_text_and_what_names_nothing_is_refused() -> None:
    name = uuid.uuid4()
    assert Example(name).id == EvalOutputItem(id=name).id == str(name)  # type: ignore[arg-type]
    for nothing in (None, True, [], {}):
        with pytest.raises(ValueError, match=r"id is .*whole number"):
            Example(nothing)  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match=r"id is .*whole number"):
            EvalOutputItem(id=nothing)


def test_rewards_are_numbers_of_any_kind_and_never_text() -> None:
    made = Trajectory(episode=[], reward=numpy.float32(0.5), shaped_rewards=[numpy.bool_(True)])
    assert (made.reward, type(made.reward), made.shaped_rewards) == (0.5, float, [1.0])
    with pytest.raises(ValidationError, match=r"number .*found a str"):
        Trajectory(episode=[], reward="0.5")


def test_what_was_written_down_does_not_change_with_an_adapters_own_status() -> None:
    with pytest.raises(ValidationError, match=r"'metrics' .* \[1\]"):
        TrainingJobStatus(**STATUS, metadata={"metrics": [1]})
    status = TrainingJobStatus(**STATUS, metadata={"loss": 1.0})
    record = JobEnded(status=status)
    status.status = TrainingStatusEnum.FAILED
    assert record.status.status == "running"


def test_a_reward_function_that_is_handed_down_is_a_copy() -> None:
    block, config = FinetuneConfig(reward_function=RewardFunctionConfig(name="a")), TrainerConfig()
    config.reward = block.reward_function
    config.reward.name = "b"
    assert block.reward_function.name == "a"


def test_an_enabled_block_has_the_shipped_components_where_it_names_none() -> None:
    block = FinetuneConfig(enabled=True, trainer=None)
    assert (block.trainer, block.trajectory_builder, block.trainer_adapter) == ("epochs", "grpo", "local")
    assert FinetuneConfig(enabled=True, trainer="mine").trainer == "mine"
    assert FinetuneConfig().trainer is None
    assert FinetuneConfig(run_configuration=None).run_configuration == FinetuneRunConfig()
