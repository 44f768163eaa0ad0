"""Stock architectures, tiny: sampled as they speak, trained by the plain gradient, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers

from etude.algorithms.grpo import Grpo
from etude.core.errors import RequestError
from etude.inference.decoder import make_decoder
from etude.learner.objective import Unit
from etude.models.architecture import merged, off_by
from etude.models.policy import LoraOptions, Policy
from tests.inference.test_decoder import assert_right, rows_of_many_lengths, run
from tests.learner.gradients import (
    Gradient,
    assert_same,
    batch_of,
    gradient_by_autograd,
    gradient_of,
    sequences,
    temperature_of,
    token_logprob,
)
from tests.learner.trees import forest
from tests.models.architectures import ARCHITECTURES, PAGE, REFUSED, Architecture, row
from tests.models.tiny_models import tokenizer


def by_plain_passes(of: Policy, batch: Sequence[Unit]) -> tuple[float, Gradient]:
    """Loss and gradient of a first GRPO step, by a forward pass for every token."""
    total, tokens, grpo = torch.zeros(()), 0, Grpo(correction="none")
    for (sample,) in batch:
        for at in (at for at, trained in enumerate(sample.mask) if trained and at):
            assert sample.logprobs is not None
            ratio = (
                token_logprob(of, sample.ids, at, temperature_of(sample, at)) - sample.logprobs[at]
            ).exp()
            cut = ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high)
            total = total - torch.minimum(ratio * sample.gains[at], cut * sample.gains[at])
            tokens += 1
    return gradient_by_autograd(of, total / tokens)


def assert_sampled_and_trained(of: Policy, tolerance: float) -> None:
    rows, until = rows_of_many_lengths(5, tokens=5)
    run(make_decoder(of, slots=8, deterministic=False), rows, until, start=4)
    assert_right(of, rows, 2e-5)
    batch = batch_of(forest(7, 12))
    packed, padded = gradient_of(of, batch, Grpo()), gradient_of(of, batch, Grpo(), packing="padded")
    assert_same(packed, padded, 1e-5)
    few = batch_of(sequences(of, 2))
    padded = gradient_of(of, few, Grpo(correction="none"), packing="padded")
    assert_same(padded, by_plain_passes(of, few), tolerance)


CASES = [
    pytest.param(of, marks=() if of.usual else (pytest.mark.slow,), id=of.config) for of in ARCHITECTURES
]


@pytest.mark.parametrize("architecture", CASES)
def test_architectures_are_sampled_and_trained_as_they_speak(architecture: Architecture):
    of = architecture.build()
    assert_sampled_and_trained(of, architecture.tolerance)
    of.use_lora(LoraOptions(r=2, alpha=4), 1)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in of.trainable().values():
            parameter.normal_(0, 0.1, generator=chance)
    assert_sampled_and_trained(of, architecture.tolerance)
    assert_merged(of)
    assert row(architecture) in PAGE.read_text(encoding="utf-8"), (
        "write it: python -m tests.models.architectures"
    )


def assert_merged(of: Policy) -> None:
    """The exported model computes the same logits as the model with its LoRA weights."""
    ids = torch.arange(20)[None] * 7 % 300
    with torch.no_grad():
        wanted = of.model(input_ids=ids, use_cache=False).logits
        found = merged(of.model)(input_ids=ids, use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_every_row_of_the_page_is_one_of_these():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(lines) == len(ARCHITECTURES) + 1


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_when_they_are_loaded(name, tmp_path):
    config = getattr(transformers, name)(
        vocab_size=len(tokenizer()), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, d_head=8
    )
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    kind.from_config(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=rf"'{config.model_type}'.*{REFUSED[name]}"):
        Policy.load(tmp_path, device="cpu")


def test_rounding_in_bfloat16_is_that_of_a_trained_model():
    plain = torch.tensor([32.0, 1.0])
    trained, wrong = plain + 0.06 * 32, plain + 0.2 * 32
    assert off_by(trained, plain, torch.bfloat16) is None
    assert off_by(trained, plain, torch.float32) == "0.06"
    assert off_by(wrong, plain, torch.bfloat16) == "0.2"
