"""Losses and gradients against TRL's own trainers, on the same tiny model and data."""

import copy
import warnings

import pytest
import torch

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo, Rloo
from etude.algorithms.imitation import Supervised
from etude.core.sample import Sample
from etude.learner.learner import Learner, LearnerOptions
from tests.learner.gradients import assert_same, get_gradient, gradient_by_autograd, sequences, to_batch
from tests.models.tiny_models import change_weights, fresh_policy, true_logprobs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")


def pad(rows, padding=0):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])


def make_trainer(kind, of, folder, rows, *, ref_model=None, **options):
    """A TRL trainer of the policy's model, in evaluation mode: no dropout, no accumulation."""
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), use_cpu=True, report_to="none", per_device_train_batch_size=8,
        disable_tqdm=True, bf16=False, **options,
    )  # fmt: skip
    more = {"ref_model": ref_model} if ref_model is not None else {}
    more |= (
        {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
        if kind in ("GRPO", "RLOO")
        else {}
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=of.model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=of.tokenizer,
        **more,
    )
    of.model.eval()
    return trainer


def grpo_trainer(of, folder, kind="GRPO", **options):
    """A trainer with DAPO's bounds, and no KL."""
    bounds = {"epsilon": 0.2, "epsilon_high": 0.28} if kind == "GRPO" else {}
    options = bounds | {"beta": 0.0, "num_generations": 8, "max_completion_length": 9} | options
    return make_trainer(kind, of, folder, {"prompt": ["a"] * 8}, **options)


def tensors(units):
    ids, real = pad([one.ids for one in units]), pad([[1] * len(one.ids) for one in units])
    return ids, real, pad([[int(weight) for weight in one.loss_weights] for one in units])


def grpo_inputs(units):
    ids, real, trained = tensors(units)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": real[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": real[:, 1:],
        "tool_mask": trained[:, 1:],
        "advantages": torch.tensor([max(one.advantages, key=abs) for one in units]),
        "old_per_token_logps": pad([one.logprobs for one in units], 0.0)[:, 1:],
        "num_items_in_batch": trained.sum(),
    }


VARIANTS = {
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2, "scale_rewards": "none"},
    "gspo": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    # TRL's bound is the ratio's own.
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_named_variant_of_grpo_is_that_of_trl(variant, tmp_path):
    of = fresh_policy()
    of.keep_base()
    units = sequences(of, 6, seed=1, shift=0.02 if variant == "gspo" else 0.3)
    base = [[0.0, *true_logprobs(of, one.ids[:1], one.ids[1:])] for one in units]
    change_weights(of, lambda one: one.mul_(1.001 if variant == "gspo" else 1.02))
    trainer = grpo_trainer(of, tmp_path, use_bias_correction_kl=False, **VARIANTS[variant])
    # It would load a reference by the model's name; its logprobs are among the inputs.
    trainer.beta = 0.04 if variant == "grpo" else 0.0
    inputs = grpo_inputs(units) | {"ref_per_token_logps": pad(base, 0.0)[:, 1:]}
    theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs))
    algorithm = Grpo(correction="none", variant=variant, constant_length=9)
    assert_same(get_gradient(of, to_batch(units), algorithm), theirs)
    assert algorithm.advantage_scale == trainer.scale_rewards.replace("group", "std")


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_the_correction_for_another_sampler_is_that_of_trl(kind, tmp_path):
    of = fresh_policy()
    units = sequences(of, 8, seed=2, shift=0.9)
    trainer = grpo_trainer(of, tmp_path, loss_type="dapo", vllm_importance_sampling_mode=f"token_{kind}")
    # As if vLLM had sampled; TRL weighs by this before it computes the loss.
    trainer.use_vllm = True
    inputs = grpo_inputs(units)
    sampled, mask = inputs.pop("old_per_token_logps"), inputs["tool_mask"]
    now = pad([[0.0, *true_logprobs(of, one.ids[:1], one.ids[1:])] for one in units], 0.0)[:, 1:]
    ratio = ((now - sampled) * mask).exp()
    outside = ratio > 2.0
    weights = ratio.clamp(max=2.0) if kind == "truncate" else ratio.masked_fill(outside, 0.0)
    inputs["importance_sampling_ratio"] = weights
    theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs))
    objective = Grpo(correction=kind, correction_cap=2.0)
    told = Learner(of, LearnerOptions()).evaluate(to_batch(units), objective)
    share = float((outside.expand_as(mask) * mask).sum() / mask.sum())
    assert told["out_of_bounds"] == pytest.approx(share) and 0 < share < 1
    assert_same(get_gradient(of, to_batch(units), objective), theirs)


def test_a_later_step_of_a_corrected_job_is_clipped_from_the_jobs_start_as_in_trl(tmp_path):
    of = fresh_policy()
    units = sequences(of, 8, seed=2, shift=0.9)
    trainer = grpo_trainer(of, tmp_path, loss_type="dapo", vllm_importance_sampling_mode="token_truncate")
    trainer.use_vllm = True
    start = pad([[0.0, *true_logprobs(of, one.ids[:1], one.ids[1:])] for one in units], 0.0)[:, 1:]
    learner, batch, objective = Learner(of, LearnerOptions()), to_batch(units), Grpo(correction="truncate")
    learner.begin_training(batch, objective)
    change_weights(of, lambda one: one.mul_(1.1))
    inputs = grpo_inputs(units)
    gap = (start - inputs["old_per_token_logps"]) * inputs["tool_mask"]
    inputs |= {"old_per_token_logps": start, "importance_sampling_ratio": gap.exp().clamp(0.0, 2.0)}
    theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs))
    metrics, _ = learner.add_gradient(batch, objective)
    assert 0 < metrics["clip_fraction"] < 1
    mine = {name: value.grad for name, value in of.trainable().items()}
    assert_same((metrics["loss"], mine), theirs)


def test_dpo(tmp_path):
    of = fresh_policy()
    of.keep_base()
    base = copy.deepcopy(of.model)
    units = sequences(of, 6)
    chosen, rejected = units[:3], units[3:]
    change_weights(of, lambda one: one.mul_(1.05))
    rows = {"prompt": ["a"] * 3, "chosen": ["b"] * 3, "rejected": ["c"] * 3}
    trainer = make_trainer("DPO", of, tmp_path, rows, ref_model=base, beta=0.5)
    ids, real, trained = tensors([*chosen, *rejected])
    inputs = {"input_ids": ids, "attention_mask": real, "completion_mask": trained}
    theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs, False))
    pairs = list(zip(chosen, rejected, strict=True))
    assert_same(get_gradient(of, to_batch(pairs), Dpo(reference="base", beta=0.5)), theirs)


def test_sft(tmp_path):
    of = fresh_policy()
    units = sequences(of, 6)
    trainer = make_trainer("SFT", of, tmp_path, {"input_ids": [[1, 2, 3]]})
    ids, real, trained = tensors(units)
    labels = ids.masked_fill(trained == 0, -100)
    loss = trainer.compute_loss(of.model, {"input_ids": ids, "attention_mask": real, "labels": labels})
    assert_same(get_gradient(of, to_batch(units), Supervised()), gradient_by_autograd(of, loss))


def test_rloo_on_policy(tmp_path):
    of = fresh_policy()
    units = []
    for one in sequences(of, 6):
        length = len(one.ids) - 1
        logprobs = (0.0, *true_logprobs(of, one.ids[:1], one.ids[1:]))
        advantages = (0.0,) + (max(one.advantages, key=abs),) * length
        units.append(Sample(one.ids, (False,) + (True,) * length, logprobs, advantages))
    trainer = grpo_trainer(of, tmp_path, "RLOO")
    inputs = grpo_inputs(units) | {"old_logps": torch.tensor([sum(one.logprobs) for one in units])}
    _, theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs))
    # Of the loss only the gradient is the same: a ratio for the sequence, and one for each of its tokens.
    _, ours = get_gradient(of, to_batch(units), Rloo(correction="none"))
    assert_same((0.0, ours), (0.0, theirs))
