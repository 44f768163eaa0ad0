"""The price of leaving the reference, by hand."""

from __future__ import annotations

import pytest
import torch

from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.learner.collate import grpo_batch, turn_sequences
from etude.learner.kl_reward import with_kl_in_rewards
from etude.learner.learner import Learner, LearnerOptions
from tests.learner.trees import forest
from tests.models.tiny_models import fresh_policy, true_logprobs


def item(context, tokens, logprobs, temperature=1.0):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content="",
        context_ids=tuple(context),
        token_ids=tuple(tokens),
        logprobs=list(logprobs),
        metadata={"temperature": temperature},
    )


def collection(*group):
    return TrajectoryCollection(trajectories=[list(group)], run_id="job")


TWO_TURNS = [item([1, 2], [3, 4], [-1.0, -2.0]), item([5], [6], [-0.5])]


def test_a_turn_is_what_came_before_it_and_it_alone():
    first, second = turn_sequences(Trajectory(episode=TWO_TURNS, reward=0.0))
    assert (first.ids, first.weights) == ((1, 2, 3, 4), (0, 0, 1, 1))
    assert (second.ids, second.weights) == ((1, 2, 3, 4, 5, 6), (0, 0, 0, 0, 0, 1))
    assert second.logprobs == (0, 0, -1, -2, 0, -0.5)


def told(values):
    """Divergences of the turns, by hand; one for each sequence that is asked for."""

    def divergences(sequences):
        assert len(sequences) == len(values)
        return values

    return divergences


def test_episodes_pay_before_they_are_compared():
    one, other = Trajectory(episode=TWO_TURNS, reward=1.0), Trajectory(episode=TWO_TURNS[:1], reward=0.5)
    priced, mean = with_kl_in_rewards(collection(one, other), 0.1, told([2.0, 4.0, -3.0]))
    assert [found.reward for found in priced.trajectories[0]] == pytest.approx([0.4, 0.8])
    assert mean == pytest.approx(1.5)
    advantages = [max(unit[0].advantages, key=abs) for unit in grpo_batch(priced).units]
    assert advantages == pytest.approx([-1.0, 1.0])


def test_branches_of_an_episode_pay_together():
    branches = [Trajectory(episode=TWO_TURNS[:1], reward=1.0, metadata={"episode": "a"}) for _ in range(2)]
    other = Trajectory(episode=TWO_TURNS[:1], reward=1.0, metadata={"episode": "b"})
    priced, _ = with_kl_in_rewards(collection(*branches, other), 0.5, told([1.0, 2.0, 1.0]))
    assert [found.reward for found in priced.trajectories[0]] == [-0.5, -0.5, 0.5]


def test_a_turn_pays_for_itself_and_those_after_it():
    one = Trajectory(episode=TWO_TURNS, reward=1.0, shaped_rewards=[3.0, 1.0])
    priced, _ = with_kl_in_rewards(collection(one), 0.5, told([1.0, 2.0]))
    assert priced.trajectories[0][0].shaped_rewards == [1.5, 0.0]


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("token_budget", [10**6, 60])
def test_divergences_are_from_the_base_model(packing, token_budget):
    of = fresh_policy()
    of.keep_base()
    sequences = forest(1, 20, temperatures=(1.0, 0.7))
    expected = []
    for one in sequences:
        base = [0.0, *true_logprobs(of, one.ids[:1], one.ids[1:], one.temperatures[0])]
        gaps = zip(one.weights, one.logprobs, base, strict=True)
        expected.append(sum(sampled - reference for weight, sampled, reference in gaps if weight))
    with torch.no_grad():
        for parameter in of.trainable().values():
            parameter.mul_(1.1)
    learner = Learner(of, LearnerOptions(packing=packing, token_budget=token_budget), seed=0)
    assert learner.divergences(sequences) == pytest.approx(expected, abs=1e-4)
