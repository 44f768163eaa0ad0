import pytest

from etude.core.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluationRunOutput
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.epochs.metrics import collection_metrics, finite, selection_metrics, validation_metrics
from etude.epochs.summary import reason_for_skip, summary_of
from tests.report.histories import history


def trajectory(reward, **metadata):
    item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=())
    return Trajectory(episode=[item], reward=reward, metadata=metadata)


def collection(*groups):
    return TrajectoryCollection(trajectories=list(groups), run_id="run")


def test_rewards_are_those_of_all_scored_episodes_where_the_builder_tells_them():
    metrics = collection_metrics(collection([trajectory(1.0)]), {"rewards": [0.0, 0.5, 1.0], "episodes": 4})
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["max_reward"]) == (0.5, 0.0, 1.0)
    assert (metrics["num_trajectories"], metrics["num_groups"], metrics["episodes"]) == (1, 1, 4)
    assert "rewards" not in metrics


def test_without_facts_rewards_are_those_of_the_trajectories():
    metrics = collection_metrics(collection([trajectory(1.0), trajectory(0.0)], [trajectory(0.5)]), {})
    assert metrics["avg_reward"] == pytest.approx(0.5)
    assert collection_metrics(collection(), {})["avg_reward"] is None


def test_the_reward_of_a_selection_is_by_group():
    metrics = selection_metrics(collection([trajectory(0.9, group_rewards=[0.0, 0.9])], [trajectory(0.5)]))
    assert metrics["filtered_avg_reward"] == pytest.approx((0.0 + 0.9 + 0.5) / 3)
    assert (metrics["filtered_groups"], metrics["filtered_trajectories"]) == (2, 2)


def evaluated(*scores):
    items = [EvalOutputItem(id=str(place), score=score) for place, score in enumerate(scores)]
    return EvaluationRunOutput(
        eval_input=EvalInput(), evaluation_results=[("correct", EvalOutput(eval_output_items=items))]
    )


def test_validation_excludes_what_has_no_score_and_counts_it():
    metrics = validation_metrics(evaluated(1.0, None, 0.0, float("nan")), "correct")
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["max_reward"]) == (0.5, 0.0, 1.0)
    assert (metrics["num_examples"], metrics["num_unscored"]) == (2, 2)


def test_a_validation_without_scores_has_no_reward_rather_than_zero():
    assert validation_metrics(evaluated(None), "correct")["avg_reward"] is None


def test_json_has_no_numbers_that_are_not_finite_and_no_sets():
    assert finite({"a": [float("nan"), (1.0, float("-inf"))], "b": {"y", "x"}, 3: "text"}) == {
        "a": [None, [1.0, None]],
        "b": ["x", "y"],
        "3": "text",
    }


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"left_out": {"flat": 3}}, "3 × flat"),
        ({"untargeted": 2}, "2 × episode without a call to the target functions and model"),
        ({"unscored": 1}, "1 × episode without a reward"),
        ({"num_groups": 4, "curriculum_flat_groups": 4}, "4 × group whose rewards differ by less"),
        ({}, "no trajectories were built"),
    ],
)
def test_a_skip_says_what_was_left_out(metrics, reason):
    assert reason in reason_for_skip(metrics)


def test_the_summary_compares_before_and_after_on_the_validation_examples():
    summary = summary_of(history([0.2, 0.3], {0: 0.1, 2: 0.8}))
    assert summary["measured_on"] == "validation"
    assert (summary["before"]["avg_reward"], summary["after"]["avg_reward"]) == (0.1, 0.8)
    assert (summary["best_version"]["number"], summary["epochs_trained"]) == (2, 2)


def test_without_validation_it_compares_the_first_and_the_last_epochs_episodes():
    summary = summary_of(history([0.2, 0.3]))
    assert summary["measured_on"] == "training episodes"
    assert (summary["before"]["avg_reward"], summary["after"]["avg_reward"]) == (0.2, 0.3)
    assert summary_of(history([]))["before"] is None
