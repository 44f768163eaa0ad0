"""Losses and gradients of GRPO, DPO and SFT, against loops over tokens that follow the papers' formulas."""

import math
from dataclasses import replace

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.core.call import Sampling
from etude.core.sample import Turn
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import MicroBatch
from tests.learner.gradients import (
    assert_same,
    find_temperature,
    get_gradient,
    gradient_by_autograd,
    sequences,
    to_batch,
    train,
)
from tests.models.tiny_models import policy


def tokens(of, sequence):
    """Index, logprob with gradient, sampled logprob and advantage of every trained token."""
    logits_TV = of.model(input_ids=torch.tensor([sequence.ids]), use_cache=False).logits[0].float()
    for at, weight in enumerate(sequence.loss_weights):
        if weight:
            logprobs_V = torch.log_softmax(logits_TV[at - 1] / find_temperature(sequence, at), dim=-1)
            yield at, logprobs_V[sequence.ids[at]], sequence.logprobs[at], sequence.advantages[at]


def clip(logprob, sampled, advantage, low=0.2, high=0.28):
    ratio = torch.exp(logprob - sampled)
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def grpo_by_hand(of, units):
    losses = [clip(logprob, s, a) for one in units for _, logprob, s, a in tokens(of, one)]
    return sum(losses) / len(losses)


def test_a_conversation_may_be_sampled_at_several_temperatures():
    of = policy()
    units = [
        replace(
            one, turns=tuple(Turn(at, at + 1, sampling=Sampling(0.5 + at / 10)) for at in range(len(one.ids)))
        )
        for one in sequences(of, 3)
    ]
    ours = get_gradient(of, to_batch(units), Grpo(correction="none"))
    assert_same(ours, gradient_by_autograd(of, grpo_by_hand(of, units)))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_skipping_what_has_no_advantage_changes_nothing(aggregation):
    of = policy()
    units = sequences(of, 6)
    idle = [replace(one, advantages=(0.0,) * len(one.ids)) for one in units[:3]]
    objective = Grpo(aggregation=aggregation)
    assert objective.skips_idle
    batch = to_batch([*idle, *units[3:]])

    class Thorough(Grpo):
        @property
        def skips_idle(self):
            return False

    thorough = Thorough(aggregation=aggregation)
    assert_same(get_gradient(of, batch, objective), get_gradient(of, batch, thorough))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_metrics_tell_what_was_clipped_and_how_far_the_policy_is_from_the_sampler(aggregation):
    of = policy()
    units = sequences(of, 6, shift=0.6)
    objective = Grpo(correction="none", aggregation=aggregation)
    metrics = train(Learner(of, LearnerOptions(learning_rate=0.0)), to_batch(units), objective)
    clips, gaps = [], []
    with torch.no_grad():
        for one in units:
            for _, logprob, sampled, advantage in tokens(of, one):
                ratio = math.exp(float(logprob) - sampled)
                bounded = min(max(ratio, 0.8), 1.28)
                clips.append(ratio * advantage > bounded * advantage)
                gaps.append(ratio - 1 - math.log(ratio))
    assert metrics["clip_fraction"] == pytest.approx(sum(clips) / len(clips), abs=1e-6)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["sampled_kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_a_token_of_probability_0_leaves_the_loss_and_its_gradient_finite():
    logprobs_BT = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    one_BT = torch.ones(1, 2)
    batch = MicroBatch(
        weights_BT=one_BT, sampled_BT=-one_BT, advantages_BT=one_BT, unit_share=1.0, token_share=0.5
    )
    loss, _ = Grpo(correction="none").loss(logprobs_BT, batch)
    (found_BT,) = torch.autograd.grad(loss, logprobs_BT)
    assert loss.isfinite() and found_BT.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize(("options", "shift"), [({}, 0.0), ({"correction": "none", "clip_high": 9.0}, 0.3)])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy_on_flat_groups(options, shift):
    """Each token of a distribution over five, as often as the policy that sampled draws it."""
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0], requires_grad=True)
    logprobs_V = torch.log_softmax(logits_V, dim=0)
    sampled_V = torch.log_softmax(logits_V.detach() + shift * torch.arange(5), dim=0)
    entropy = -(logprobs_V.exp() * logprobs_V).sum()
    (expected_V,) = torch.autograd.grad(-0.2 * entropy, logits_V, retain_graph=True)
    column = {"weights_BT": sampled_V.exp()[:, None], "sampled_BT": sampled_V[:, None]}
    batch = MicroBatch(**column, advantages_BT=torch.zeros(5, 1), unit_share=1.0, token_share=0.2)
    loss, _ = Grpo(entropy_bonus=0.2, **options).loss(logprobs_V[:, None], batch)
    (found_V,) = torch.autograd.grad(loss, logits_V)
    assert torch.allclose(found_V, expected_V, atol=1e-6)
