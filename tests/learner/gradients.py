"""The gradient of one optimiser step, and sequences to take it of, which begin alike as branches do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Event
from typing import Any

import torch

from etude.backends.job_training import JobData, JobTraining, Tell
from etude.core.call import Sampling
from etude.core.sample import Sample, Turn, Unit, is_trained
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import Objective
from etude.models.policy import Policy
from tests.models.tiny_models import true_logprobs

Gradient = dict[str, torch.Tensor]


def get_gradient(
    of: Policy, batch: Sequence[Unit], objective: Objective, **options: Any
) -> tuple[float, Gradient]:
    """Loss and gradient of one step of the learner, before clipping. The weights stay as they are."""
    found: Gradient = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: found.update({name: parameter.grad.clone()})
        )
        for name, parameter in of.trainable().items()
    ]
    try:
        learner = Learner(of, LearnerOptions(**{"learning_rate": 0.0} | options))
        metrics = train(learner, batch, objective)
    finally:
        for hook in hooks:
            hook.remove()
    return metrics["loss"], found


def train(
    learner: Learner,
    units: Sequence[Unit],
    objective: Objective,
    tell: Tell = lambda news: None,
    canceled: Event | None = None,
    *,
    passes: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Take all steps of a job; the mean of their metrics."""
    rows = [(unit,) for unit in units if is_trained(unit)]
    data = JobData(objective, rows, (), passes, batch_size, seed, ("pass", learner.step))
    return JobTraining(learner, data, tell).run(canceled or Event())


def gradient_by_autograd(of: Policy, loss: torch.Tensor) -> tuple[float, Gradient]:
    """Loss and gradient of a scalar that was made from the policy's parameters."""
    parameters = of.trainable()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return float(loss.detach()), {
        name: torch.zeros_like(parameters[name]) if grad is None else grad
        for name, grad in zip(parameters, grads, strict=True)
    }


def assert_same(one: tuple[float, Gradient], other: tuple[float, Gradient], tolerance: float = 1e-5) -> None:
    """Gradients agree relative to their largest number, losses to 0.1 at least: they are sums that cancel."""
    assert abs(one[0] - other[0]) <= tolerance * max(abs(other[0]), 0.1), (one[0], other[0])
    names = one[1].keys() | other[1].keys()
    largest = max(float(grad.abs().max()) for grad in other[1].values())
    assert largest > 0
    for name in names:
        mine, theirs = (g.get(name, torch.zeros(())) for g in (one[1], other[1]))
        assert float((mine - theirs).abs().max()) <= tolerance * largest, name


def find_temperature(sequence: Sample, at: int) -> float:
    """The temperature that a token was sampled at."""
    return next(turn.sampling.temperature for turn in sequence.turns if turn.start <= at < turn.stop)


def token_logprob(of: Policy, ids: tuple[int, ...], at: int, temperature: float = 1.0) -> torch.Tensor:
    """Logprob of one token given those before it, by a forward pass of its own, with gradient."""
    logits = of.model(input_ids=torch.tensor([ids[:at]]), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)[ids[at]]


def sequences(
    of: Policy, count: int, *, seed: int = 0, temperature: float = 1.0, shift: float = 0.3
) -> list[Sample]:
    """Sequences of two turns; their sampled logprobs are off by up to `shift`, as after a few steps."""
    choose = random.Random(seed)
    return [_sequence(of, choose, temperature, shift, choose.uniform(-2, 2)) for _ in range(count)]


def _sequence(
    of: Policy, choose: random.Random, temperature: float, shift: float, advantage: float
) -> Sample:
    ids: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    for turn in range(2):
        given, sampled = choose.randint(1 + (turn == 0), 5), choose.randint(1, 6)
        ids += [choose.randrange(7, 300) for _ in range(given + sampled)]
        mask += [False] * given + [True] * sampled
        turns.append(Turn(len(ids) - sampled, len(ids), sampling=Sampling(temperature)))
    true = [0.0, *true_logprobs(of, ids[:1], ids[1:], temperature)]
    logprobs = [w * (value + choose.uniform(-shift, shift)) for w, value in zip(mask, true, strict=True)]
    return Sample(
        tuple(ids), tuple(mask), tuple(logprobs), tuple(w * advantage for w in mask), turns=tuple(turns)
    )


def to_batch(units: Any) -> list[Unit]:
    """Samples, or pairs of them, as the learner takes them."""
    return [(one,) if isinstance(one, Sample) else tuple(one) for one in units]


VOCABULARY = 300


def forest(seed: int, count: int, *, temperatures: tuple[float, ...] = (1.0,)) -> list[Sample]:
    """`count` sequences; each goes on from a random place of an earlier one, or starts anew.

    All fields are random, also for tokens that sequences share.
    """
    choose = random.Random(seed)
    grown: list[list[int]] = []
    for _ in range(count):
        base = choose.choice(grown) if grown and choose.random() < 0.85 else []
        stem = base[: choose.randint(len(base) // 2, len(base))]
        grown.append(stem + [choose.randrange(7, VOCABULARY) for _ in range(choose.randint(3, 12))])
    return [_fill(tuple(ids), choose, temperatures) for ids in grown]


def _fill(ids: tuple[int, ...], choose: random.Random, temperatures: tuple[float, ...]) -> Sample:
    weights = [0.0, *(choose.choice([0.0, 1.0, 1.0]) for _ in ids[1:])]
    weights[choose.randrange(1, len(ids))] = 1.0
    advantage = choose.uniform(-2, 2)
    return Sample(
        ids,
        tuple(map(bool, weights)),
        advantages=tuple(weight * advantage * choose.choice([1.0, 0.5]) for weight in weights),
        # About what a model with a vocabulary of that size says, so that some ratios are clipped.
        logprobs=tuple(weight * choose.uniform(-7, -5) for weight in weights),
        turns=(Turn(0, len(ids), sampling=Sampling(choose.choice(temperatures))),),
    )
