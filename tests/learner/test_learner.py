"""Steps of the learner: what they depend on, stops them, and how they are taken up again."""

import threading
from dataclasses import replace

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.config.finetuning import LoraOptions
from etude.core.errors import RequestError, StoreError, TrainingError
from etude.core.job import ModelVersion
from etude.learner.learner import Learner, LearnerOptions, TrainingCanceled
from etude.learner.optimiser import Schedule
from tests.learner.gradients import assert_same, forest, get_gradient, sequences, to_batch, train
from tests.models.tiny_models import change_weights, family, fresh_policy, policy
from tests.support import one_quick

OPTIONS = LearnerOptions(
    learning_rate=1e-2,
    weight_decay=0.1,
    schedule=Schedule("cosine", warmup_steps=4, trainings=3),
    token_budget=40,
)
STEPS = {"batch_size": 3, "passes": 2}


def jobs(count):
    return [to_batch(sequences(policy(), 7, seed=seed)) for seed in range(count)]


def everything(learner):
    """All that the next step depends on."""
    tensors = {name: tensor.tolist() for name, tensor in learner.optimiser.tensors().items()}
    return learner.step, learner.trained, learner.policy.digest(), tensors


def learn(learner, job, objective=None):
    train(learner, job, objective or Grpo(), **STEPS)
    learner.policy.mark_changed(learner.policy.version + 1)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 lora"])
def test_a_learner_taken_up_from_the_disk_goes_on_bit_for_bit(tmp_path, kind):
    def fresh():
        of = fresh_policy()
        of.model.to(torch.bfloat16 if "bfloat16" in kind else torch.float32)
        if "lora" in kind:
            of.use_lora(LoraOptions(r=4), seed=0)
        of.keep_base()
        return Learner(of, OPTIONS)

    (first, second), objective = jobs(2), Grpo(beta=0.1)
    whole, before, resumed = fresh(), fresh(), fresh()
    for job in (first, second):
        learn(whole, job, objective)
    learn(before, first, objective)
    version = ModelVersion(number=1, location=str(tmp_path), digest=before.snapshot().save(tmp_path))
    resumed.policy.adopt(version)
    resumed.restore(tmp_path)
    assert everything(resumed) == everything(before)
    learn(resumed, second, objective)
    assert everything(resumed) == everything(whole)
    assert {tensor.dtype for tensor in whole.optimiser.tensors().values()} == {torch.float32}


def test_the_schedule_runs_over_all_trainings_however_many_steps_each_takes():
    options = LearnerOptions(learning_rate=1e-3, schedule=Schedule("linear", trainings=2))
    learner = Learner(fresh_policy(), options)
    rates = []
    for job in (to_batch(sequences(policy(), 9)), to_batch(sequences(policy(), 3))):
        train(
            learner,
            job,
            Supervised(),
            lambda news: news.metrics and rates.append(news.metrics["learning_rate"] / 1e-3),
            batch_size=3,
        )
    assert rates == pytest.approx([1, 5 / 6, 4 / 6, 1 / 2])


def test_a_job_is_clipped_from_the_weights_that_it_began_with_however_far_the_sampler_is():
    far_off = to_batch(sequences(policy(), 9, shift=0.9))
    learner = Learner(fresh_policy(), replace(OPTIONS, learning_rate=0.05, schedule=Schedule()))
    clipped = []
    train(
        learner,
        far_off,
        Grpo(),
        lambda news: news.metrics and clipped.append(news.metrics["clip_fraction"]),
        passes=3,
    )
    assert clipped[0] == 0 < clipped[1] <= 1
    alone = train(Learner(fresh_policy(), OPTIONS), far_off, Grpo())
    assert alone["clip_fraction"] == 0 < alone["out_of_bounds"]


def test_the_mismatch_is_what_the_learner_differed_by_before_its_first_step():
    on_policy = to_batch(sequences(policy(), 9, shift=0.0))
    learner = Learner(fresh_policy(), replace(OPTIONS, schedule=Schedule()))
    metrics = train(learner, on_policy, Grpo(), **STEPS)
    assert metrics["mismatch_kl"] < 1e-9 < 1e-6 < metrics["sampled_kl"]
    assert "mismatch_kl" not in train(Learner(fresh_policy(), OPTIONS), on_policy, Supervised())


@pytest.mark.parametrize("field", ["advantages", "weights"])
def test_a_job_with_nothing_to_learn_from_is_an_error(field):
    idle = [replace(one, **{field: (0.0,) * len(one.ids)}) for one in sequences(policy(), 3)]
    learner = Learner(fresh_policy(), LearnerOptions())
    with pytest.raises(TrainingError, match=r"no token .* weight .* advantage"):
        train(learner, to_batch(idle), Grpo())
    with pytest.raises(TrainingError, match=r"no token .* weight .* advantage"):
        train(learner, to_batch([]), Supervised())


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change():
    of = fresh_policy()
    one = sequences(of, 1)[0]
    wild = replace(one, advantages=tuple(weight * 1e38 for weight in one.loss_weights))
    learner = Learner(of, LearnerOptions())
    weights = of.digest()
    with pytest.raises(TrainingError, match=r"step 1 .* finite; lower learning_rate"):
        train(learner, to_batch([wild, replace(wild, logprobs=tuple(-100.0 * w for w in one.mask))]), Grpo())
    of.mark_changed(0)
    assert of.digest() == weights
    assert all(parameter.grad is None for parameter in of.trainable().values())


def test_a_job_can_be_canceled_between_two_steps_and_within_one():
    canceled = threading.Event()
    learner = Learner(fresh_policy(), OPTIONS)
    with pytest.raises(TrainingCanceled, match="canceled after 2 of 6 steps"):
        train(learner, jobs(1)[0], Grpo(), lambda news: news.step == 2 and canceled.set(), canceled, **STEPS)
    assert learner.step == 2
    with pytest.raises(TrainingCanceled, match="after 0 of 1 steps"):
        train(Learner(fresh_policy(), LearnerOptions()), jobs(1)[0], Grpo(), canceled=canceled)


def test_a_state_that_is_missing_damaged_or_anothers_is_an_error(tmp_path):
    learner = Learner(fresh_policy(), OPTIONS)
    with pytest.raises(StoreError, match="SHA256SUMS is missing"):
        learner.restore(tmp_path)
    learn(learner, jobs(1)[0])
    learner.snapshot().save(tmp_path)
    other = fresh_policy()
    other.use_lora(LoraOptions(r=2), seed=0)
    with pytest.raises(StoreError, match=r"optimiser .* \(model\.embed_tokens\.weight\); .* LoRA"):
        Learner(other, OPTIONS).restore(tmp_path)
    (tmp_path / "optimiser.safetensors").write_bytes(b"broken")
    with pytest.raises(StoreError, match=r"optimiser\.safetensors .* written"):
        learner.restore(tmp_path)
    (tmp_path / "learner.json").write_text("{}")
    with pytest.raises(StoreError, match=r"learner.json"):
        learner.restore(tmp_path)


def theirs(name: str, steps: int) -> list[float]:
    from transformers import get_scheduler

    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimiser, num_warmup_steps=0, num_training_steps=steps)
    return [*map(schedule.lr_lambdas[0], range(steps))]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("trainings", "steps_each"), [(12, 1), (1, 12), (3, 4)])
def test_trainings_of_equal_length_have_the_rates_of_transformers(shape, trainings, steps_each):
    schedule = Schedule(shape, trainings=trainings)
    ours = [
        schedule.share(trained * steps_each + step + 1, trained, step / steps_each)
        for trained in range(trainings)
        for step in range(steps_each)
    ]
    assert ours == pytest.approx(theirs(shape, trainings * steps_each), abs=1e-12)


def test_warm_up_multiplies_what_the_rate_has_fallen_to():
    schedule = Schedule("linear", warmup_steps=4, trainings=8)
    assert [schedule.share(step, step - 1, 0.0) for step in range(1, 6)] == pytest.approx(
        [1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8]
    )


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("kind", one_quick("gemma2", "llama", "lora"))
def test_the_gradient_is_the_same(packing, kind):
    of = family("Gemma2Config", head_dim=8, sliding_window=6) if kind == "gemma2" else fresh_policy()
    if kind == "lora":
        of.use_lora(LoraOptions(r=4), seed=0)
        change_weights(of, lambda one: one.normal_(0, 0.1, generator=torch.Generator().manual_seed(0)))
    batch, objective = to_batch(forest(1, 10)), Grpo()
    plain = get_gradient(of, batch, objective, packing=packing)
    again = get_gradient(of, batch, objective, packing=packing, gradient_checkpointing=True)
    assert_same(again, plain)


def test_a_model_that_does_not_say_what_its_layers_are_is_refused():
    of = fresh_policy()
    of.model.model.layers = torch.nn.ModuleList()
    with pytest.raises(RequestError, match=r"gradient_checkpointing: .* 'llama' .*; .* token_budget"):
        Learner(of, LearnerOptions(gradient_checkpointing=True))
