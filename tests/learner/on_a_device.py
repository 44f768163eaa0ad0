"""Losses on a device that is not the CPU: nothing mixes the two. A pretended one has no gradients.

Run by `tests/test_devices.py`, in a process of its own.
"""

import pytest
import torch

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Optimiser
from tests.learner.gradients import forest, to_batch
from tests.models.tiny_models import family
from tests.pretended import move_to_device, pretending

OBJECTIVES = {
    "grpo": Grpo(beta=0.1),
    "grpo by sequence": Grpo(aggregation="sequence", correction="truncate"),
    "dpo": Dpo(beta=0.5, reference="base"),
    "sft": Supervised(),
}


def evaluate(policy, name, packing):
    policy.keep_base()
    learner = Learner(policy, LearnerOptions(packing=packing, token_budget=100))
    sequences = forest(1, 20, temperatures=(1.0, 0.7))
    units = list(zip(sequences[0::2], sequences[1::2], strict=True)) if name == "dpo" else sequences
    found = learner.evaluate(to_batch(units), OBJECTIVES[name])
    assert learner.note is None
    return found


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_those_of_the_cpu(name, packing):
    config = {"head_dim": 8, "sliding_window": 6}
    wanted = evaluate(family("Gemma2Config", **config), name, packing)
    with pretending():
        found = evaluate(move_to_device(family("Gemma2Config", **config)), name, packing)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_masters_follow_with_one_wait():
    policy = family("LlamaConfig")
    policy.model.to(torch.bfloat16)
    with pretending() as waits:
        optimiser = Optimiser(move_to_device(policy).trainable(), betas=(0.9, 0.95), weight_decay=0.0)
        masters = list(optimiser.masters.values())
        masters[0] *= 1 + 2**-12  # They still round to the same.
        finer = masters[0].clone()
        waits.clear()
        optimiser.sync_masters()
        assert waits.total() == 1
        assert torch.equal(masters[0], finer)
        policy.trainable().popitem()[1].add_(1.0)
        optimiser.sync_masters()
        assert all(map(torch.equal, masters, (one.float() for one in policy.trainable().values())))


def test_numbers_of_samples_are_taken_off_the_device_at_once():
    def count_waits(count):
        sequences = forest(1, count)
        policy = move_to_device(family("LlamaConfig"))
        policy.keep_base()
        learner = Learner(policy, LearnerOptions(token_budget=10_000))
        chunk = next(iter(learner._cut([(one,) for one in sequences], [[1.0]] * count, (1.0, 1.0))))
        logprobs_BT = chunk.logprobs(policy.model)
        before = waits.total()
        chunk.select(logprobs_BT)
        seen = waits.total() - before
        learner._logprobs(sequences)
        return seen, waits.total() - before - seen

    with pretending() as waits:
        assert count_waits(4) == count_waits(20)
