"""The figures of epochs and validations, scores with their intervals, and the summary of several targets."""

import pytest

from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from etude.core.interfaces import ProgressSums
from etude.core.sample import TrajectoryCollection
from etude.core.stats import estimate
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.loop.evaluation import item_rows
from etude.loop.evaluation import score_statistics as scores_of_result
from etude.loop.metrics import (
    collection_metrics,
    reason_for_skip,
    reason_to_stop,
    reward_metrics,
    selection_metrics,
    validation_metrics,
)
from etude.loop.recording_wrappers import SharedProgress
from etude.store.figures import summarize
from tests.show.histories import history


def trajectory(reward, **fields):
    item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=())
    return Trajectory(episode=[item], reward=reward, **fields)


def figures(*groups):
    return TrajectoryCollection(trajectories=list(groups), run_id="run").figures


def test_rewards_are_those_of_all_scored_episodes_where_the_builder_tells_them():
    metrics = collection_metrics(figures([trajectory(1.0)]), {"rewards": [0.0, 0.5, 1.0], "episodes": 4})
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["max_reward"]) == (0.5, 0.0, 1.0)
    counts = [metrics[key] for key in ("num_trajectories", "num_groups", "episodes", "num_scored")]
    assert counts == [1, 1, 4, 3]
    assert "rewards" not in metrics


def test_without_facts_rewards_are_those_of_the_trajectories():
    metrics = collection_metrics(figures([trajectory(1.0), trajectory(0.0)], [trajectory(0.5)]), {})
    assert (metrics["avg_reward"], metrics["num_scored"]) == (pytest.approx(0.5), 3)
    assert collection_metrics(figures(), {})["avg_reward"] is None


def test_the_reward_of_a_selection_is_by_group():
    metrics = selection_metrics(figures([trajectory(0.9, group_rewards=[0.0, 0.9])], [trajectory(0.5)]))
    assert metrics["filtered_avg_reward"] == pytest.approx((0.0 + 0.9 + 0.5) / 3)
    assert (metrics["filtered_groups"], metrics["filtered_trajectories"]) == (2, 2)


def evaluation(*scores):
    items = [EvalOutputItem(id=str(place), score=score) for place, score in enumerate(scores)]
    return EvaluationRunOutput(
        eval_input=EvalInput(), evaluation_results=[("correct", EvalOutput(eval_output_items=items))]
    )


def test_validation_excludes_what_has_no_score_and_counts_it():
    metrics = validation_metrics(evaluation(1.0, None, 0.0, float("nan")), "correct")
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["max_reward"]) == (0.5, 0.0, 1.0)
    assert (metrics["num_examples"], metrics["num_unscored"], metrics["num_scored"]) == (2, 2, 2)
    assert validation_metrics(evaluation(None), "correct")["avg_reward"] is None


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"left_out": {"flat": 3}}, "3 × flat"),
        ({"untargeted": 2}, "2 × episode without an answered call"),
        ({"unscored": 1}, "1 × episode without"),
        ({"num_groups": 4, "curriculum_flat_groups": 4}, "4 × group whose rewards"),
        ({"left_out": {"flat": 3}, **reward_metrics([0.0] * 6)}, "3 × flat; every reward is 0"),
        (reward_metrics([1.0] * 6), "every reward is 1, the highest"),
        ({}, "no trajectories"),
    ],
)
def test_a_skip_says_what_was_left_out(metrics, reason):
    assert reason in reason_for_skip(metrics)


def test_the_summary_compares_before_and_after_and_says_what_was_measured():
    summary = summarize(history([0.2, 0.3, 0.4], {0: 0.1, 2: 0.8}))
    assert summary.measured_on == "validation"
    assert (summary.before.avg_reward, summary.after.avg_reward) == (0.1, 0.8)
    assert (summary.best_version.number, summary.epochs_trained) == (2, 3)
    assert summary.before.measured == "validation examples, before training (v0)"
    assert summary.after.measured == "validation examples, after epoch 2 (v2)"
    assert (summary.after.version, summary.last_version.number) == (2, 3)
    assert not summary.is_measured, "v3 was trained after the last validation"
    assert summarize(history([0.2], {0: 0.1, 1: 0.8})).is_measured


def test_without_validation_nothing_is_called_before_after_or_best():
    summary = summarize(history([0.2, 0.3, 0.4, 0.5]))
    assert summary.measured_on == "training episodes"
    assert summary.before is summary.after is summary.best_version is None
    first, last = summary.first_epoch, summary.last_epoch
    assert (first.avg_reward, first.measured) == (0.2, "training episodes of epoch 1, sampled from v0")
    assert (last.avg_reward, last.measured) == (0.5, "training episodes of epoch 4, sampled from v3")
    assert (summary.last_version.number, summary.is_measured) == (4, False)
    assert summarize(history([0.2])).last_epoch is None, "one epoch has one figure"
    before = summarize(history([0.2], {0: 0.1}))
    assert (before.before.avg_reward, before.after, before.best_version) == (0.1, None, None)


def test_every_evaluator_is_in_the_metrics_of_epochs_and_validations():
    metrics = collection_metrics(figures(), {"scores": {"correct": [1.0, 0.0], "brief": []}, "rewards": []})
    correct = metrics["evaluators"]["correct"]
    assert (correct["mean"], correct["n"]) == (0.5, 2)
    assert 0 <= correct["low"] < 0.5 < correct["high"] <= 1
    assert metrics["evaluators"]["brief"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert "scores" not in metrics
    assert validation_metrics(evaluation(1.0, None, 0.0), "correct")["evaluators"]["correct"]["n"] == 2


def test_an_interval_that_is_not_known_is_none():
    assert collection_metrics(figures(), {"rewards": [7.0]})["reward_low"] is None
    assert collection_metrics(figures(), {"rewards": [0.7]})["reward_low"] > 0


def test_groups_with_equal_rewards_are_counted_where_rewards_are_compared():
    flat, other = [trajectory(1.0), trajectory(1.0)], [trajectory(0.0), trajectory(1.0)]
    alone, steps = [trajectory(1.0)], [trajectory(1.0).model_copy(update={"shaped_rewards": [0.0, 1.0]})] * 2
    assert collection_metrics(figures(flat, other, alone, steps), {})["reward_groups"] == {
        "compared": 3,
        "flat": 1,
    }
    told = {"reward_groups": {"compared": 4, "flat": 4}}
    assert collection_metrics(figures(), told)["reward_groups"] == told["reward_groups"]
    assert "reward_groups" not in collection_metrics(figures(flat), {}, compares=False)


def test_validations_count_where_there_are_any_and_epochs_otherwise():
    assert reason_to_stop(history([0.1, 0.9], {0: 0.5}), None, 0.9) is None
    assert "training-episode reward 0.900" in reason_to_stop(history([0.1, 0.9, None]), None, 0.9)


@pytest.mark.parametrize(
    ("rewards", "patience", "stops"),
    [
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4, 0.4], 2, True),
        ([0.5, 0.4, 0.6], 2, False),
        ([0.5, 0.6, 0.55, 0.6], 2, True),
        ([0.5, 0.5], 1, True),
        ([0.5, 0.4, 0.3], None, False),
        ([], 1, False),
    ],
)
def test_patience_ends_when_the_last_rewards_have_not_beaten_the_best(rewards, patience, stops):
    assert (reason_to_stop(history(rewards), patience, None) is not None) == stops


@pytest.mark.parametrize(("reward", "stops"), [(0.89, False), (0.9, True), (None, False)])
def test_the_target_ends_when_the_last_reward_reaches_it(reward, stops):
    assert (reason_to_stop(history([0.2], {0: 0.2, 1: reward}), None, 0.9) is not None) == stops


def test_a_resumed_run_looks_only_at_what_was_known_then():
    past = history([0.1, 0.2, 0.3], {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.2}).until(2)
    assert [entry.reward.mean for entry in past.validations] == [0.1, 0.9, 0.2]
    assert [entry.epoch for entry in past.epochs] == [1, 2]


def item(name, generation, score, error=None):
    return EvalOutputItem(id=name, generation=generation, score=score, error=error)


def item_scores(items):
    return scores_of_result(EvalOutput(eval_output_items=items))


def test_one_episode_for_each_example_is_an_ordinary_estimate():
    scores = [1.0, 0.0, 1.0, 1.0]
    found = item_scores([item(str(place), 0, score) for place, score in enumerate(scores)])
    expected = estimate(scores)
    assert (found["mean"], found["low"], found["high"]) == (expected.mean, expected.low, expected.high)


def test_episodes_of_one_example_are_no_independent_draws():
    """Ten times the same two answers are no more certain than the two."""
    once = item_scores([item("a", 0, 0.4), item("b", 0, 0.6)])
    often = item_scores([item(name, n, score) for name, score in (("a", 0.4), ("b", 0.6)) for n in range(10)])
    assert (often["mean"], often["low"], often["high"]) == pytest.approx(
        (once["mean"], once["low"], once["high"])
    )
    assert (often["n"], often["scored"]) == (2, 20)


def test_what_has_no_score_is_counted_and_is_no_zero():
    found = item_scores([item("a", 0, 1.0), item("a", 1, None, "failed"), item("b", 0, None, "failed")])
    assert (found["mean"], found["n"], found["scored"], found["unscored"]) == (1.0, 1, 1, 2)
    none = item_scores([item("a", 0, None, "failed")])
    assert (none["mean"], none["low"], none["high"]) == (None, None, None)


def test_a_row_for_each_episode():
    inputs = [EvalInputItem(id="a", output_obj="4", expected_output_obj="5")]
    outputs = [
        ("right", EvalOutput(eval_output_items=[item("a", 0, 0.0)])),
        ("judged", EvalOutput(eval_output_items=[item("a", 0, None, "no answer")])),
    ]
    output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=inputs), evaluation_results=outputs)
    (row,) = item_rows(output)
    assert row["scores"] == {"right": 0.0, "judged": None}
    assert row["errors"] == {"judged": "no answer"}
    assert (row["id"], row["output"], row["expected"]) == ("a", "4", "5")


class Counting(ProgressSums):
    """Keeps the phases with the episodes and scores that were told in each."""

    def __init__(self):
        self.phases = []
        super().__init__()

    def phase(self, name, total=None):
        super().phase(name, total)
        self.phases.append([name, total, 0, 0])

    def episode_finished(self, episode):
        super().episode_finished(episode)
        self.phases[-1][2] += 1

    def scored(self, item):
        super().scored(item)
        self.phases[-1][3] += 1


def collect(progress, phase, count):
    progress.phase("collecting", count)
    for generation in range(count):
        progress.episode_finished(EpisodeRecord(f"{phase}/a/{generation}", Example("a"), generation))
        progress.scored(EvalOutputItem(id="a", generation=generation, score=1.0))


def test_episodes_that_targets_share_are_told_once():
    counting = Counting()
    shared = SharedProgress(counting)
    for epoch in range(2):
        shared.epoch_started(epoch, 2)
        collect(shared, f"train/{epoch}", 4)
        collect(shared, f"train/{epoch}", 4)
        collect(shared, f"train/{epoch}-k4", 16)
        shared.phase("training")
    told = [["collecting", 4, 4, 4], ["collecting", 16, 16, 16], ["training", None, 0, 0]]
    assert counting.phases == told * 2
