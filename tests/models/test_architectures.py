"""Stock architectures, and LoRA weights on their layers: sampled, trained, exported, or refused by name."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from etude.algorithms.grpo import Grpo
from etude.config.finetuning import LoraOptions
from etude.core.errors import RequestError
from etude.core.sample import Unit
from etude.engines.embedded import make_decoder
from etude.models.architecture import logit_error
from etude.models.policy import Policy
from etude.server.backend import context_arguments
from tests.engines.test_decoder import assert_right, rows_of_many_lengths, run
from tests.learner.gradients import (
    Gradient,
    assert_same,
    find_temperature,
    forest,
    get_gradient,
    gradient_by_autograd,
    sequences,
    to_batch,
    token_logprob,
)
from tests.models.architectures import ARCHITECTURES, PAGE, REFUSED, Architecture, row
from tests.models.tiny_models import change_weights, family, fresh_policy, tokenizer


def sees() -> Policy:
    return next(each for each in ARCHITECTURES if each.config == "Gemma3Config").build()


@pytest.mark.parametrize("name", ["nothing", "norm", "lm_head", "embed_tokens"])
@pytest.mark.parametrize("others", [[], ["q_proj"]])
def test_names_of_no_layer_that_takes_them_are_refused(name, others):
    told = f"^LoRA .* '{name}'; 'target_modules' can name down_p"
    with pytest.raises(RequestError, match=told):
        fresh_policy().use_lora(LoraOptions(target_modules=[*others, name]), seed=0)


def test_a_name_may_be_a_layers_whole_path():
    of = fresh_policy()
    of.use_lora(LoraOptions(target_modules=["model.layers.1.mlp.up_proj"]), seed=0)
    layers = {name.split(".lora_")[0] for name in of.trainable()}
    assert layers == {"base_model.model.model.layers.1.mlp.up_proj"}


def test_what_sees_gets_none_of_them():
    of = sees()
    of.use_lora(LoraOptions(target_modules=["q_proj"]), seed=0)
    assert all("language_model" in name for name in of.trainable())
    with pytest.raises(RequestError, match="'position_embedding'; 'target_modules'"):
        sees().use_lora(LoraOptions(target_modules=["position_embedding"]), seed=0)


def test_layers_whose_weights_are_used_without_being_called_get_none_of_them():
    for config, names in (("MambaConfig", ["conv1d", "out_proj"]), ("Lfm2Config", ["conv"])):
        for name in names:
            of = next(each for each in ARCHITECTURES if each.config == config).build()
            with pytest.raises(RequestError, match=f"'{name}'; 'target_modules'"):
                of.use_lora(LoraOptions(target_modules=[name]), seed=0)


def by_plain_passes(of: Policy, batch: Sequence[Unit]) -> tuple[float, Gradient]:
    """Loss and gradient of a first GRPO step, by a forward pass for every token."""
    total, tokens, grpo = torch.zeros(()), 0, Grpo(correction="none")
    for (sample,) in batch:
        for at in (at for at, trained in enumerate(sample.mask) if trained and at):
            assert sample.logprobs is not None
            ratio = (
                token_logprob(of, sample.ids, at, find_temperature(sample, at)) - sample.logprobs[at]
            ).exp()
            cut = ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high)
            total = total - torch.minimum(ratio * sample.gains[at], cut * sample.gains[at])
            tokens += 1
    return gradient_by_autograd(of, total / tokens)


def assert_sampled_and_trained(of: Policy, tolerance: float) -> None:
    rows, until = rows_of_many_lengths(5, tokens=5)
    run(make_decoder(of, slots=8, deterministic=False), rows, until, start=4)
    assert_right(of, rows, 2e-5)
    batch = to_batch(forest(7, 12))
    packed, padded = get_gradient(of, batch, Grpo()), get_gradient(of, batch, Grpo(), packing="padded")
    assert_same(packed, padded, 1e-5)
    few = to_batch(sequences(of, 2))
    padded = get_gradient(of, few, Grpo(correction="none"), packing="padded")
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
    change_weights(of, lambda one: one.normal_(0, 0.1, generator=chance))
    assert_sampled_and_trained(of, architecture.tolerance)
    assert_merged(of)
    assert row(architecture) in PAGE.read_text(encoding="utf-8"), (
        "write it: python -m tests.models.architectures"
    )


def test_a_context_that_longrope_extends_ends_at_its_original_length(tmp_path: Path):
    """Beyond it, transformers rotates short rows differently when they share a batch with a long one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 96, **factors}
    of = family("Phi3Config", rope_parameters=rope, original_max_position_embeddings=96)
    assert of.max_context == 96
    assert_sampled_and_trained(of, 1e-5)
    of.export(tmp_path)
    assert context_arguments(str(tmp_path)) == ("--max-model-len", "96")


def assert_merged(of: Policy) -> None:
    """The exported model computes the same logits as the model with its LoRA weights."""
    ids = torch.arange(20)[None] * 7 % 300
    with torch.no_grad():
        wanted = of.model(input_ids=ids, use_cache=False).logits
        found = copy.deepcopy(of.model).merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_every_row_of_the_page_is_one_of_these():
    page = PAGE.read_text(encoding="utf-8").partition("## Families")[0]
    assert sum(line.startswith("| ") for line in page.splitlines()) == len(ARCHITECTURES) + 1


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
    assert logit_error(trained, plain, torch.bfloat16) is None
    assert logit_error(trained, plain, torch.float32) == "0.06"
    assert logit_error(wrong, plain, torch.bfloat16) == "0.2"
