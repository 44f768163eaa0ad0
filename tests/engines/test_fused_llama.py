"""The fused forward pass says what the model says, and is taken only where it knows the model whole."""

import random

import pytest
import torch

from etude.config.finetuning import LoraOptions
from etude.engines import fused_llama
from etude.engines.embedded import make_decoder
from etude.engines.fused_llama import can_fuse
from tests.engines.test_decoder import assert_right, drawn_ids, live
from tests.models.tiny_models import change_weights, family, fresh_policy, true_logprobs
from tests.support import one_quick

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FUSED = {
    "llama": lambda: family("LlamaConfig"),
    "all biases": lambda: family("LlamaConfig", attention_bias=True, mlp_bias=True),
    "scaled positions": lambda: family("LlamaConfig", rope_parameters=LLAMA3),
    "tied embeddings": lambda: family("LlamaConfig", tie_word_embeddings=True),
    "mistral": lambda: family("MistralConfig", sliding_window=16, head_dim=8),
    "qwen2": lambda: family("Qwen2Config", use_sliding_window=True, max_window_layers=1, sliding_window=16),
    "qwen3": lambda: family("Qwen3Config", head_dim=16),
    "gemma": lambda: family("GemmaConfig", head_dim=16, hidden_activation="gelu_pytorch_tanh"),
    "gemma3": lambda: family(
        "Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=16, sliding_window_pattern=2
    ),
}


def sample(of, *, deterministic=False, lengths=(1, 2, 5, 30, 60)):
    """Prompts of many lengths, continued."""
    choose = random.Random(2)
    decoder = make_decoder(of, slots=8, deterministic=deterministic)
    rows = [live(n, drawn_ids(choose, n)) for n in lengths]
    for _ in range(6):
        decoder.step(rows)
    return rows


def randomise(of):
    """All parameters random, biases and norms too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in of.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.3, generator=generator))
    return of


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("deterministic", one_quick(False, True))
def test_the_logprobs_are_the_models_own(name, deterministic):
    of = randomise(FUSED[name]())
    assert can_fuse(of.model)
    assert_right(of, sample(of, deterministic=deterministic))


@pytest.mark.parametrize("name", one_quick("all biases", "llama"))
def test_the_logprobs_are_the_models_own_with_weights_large_enough_to_be_packed(name, monkeypatch):
    monkeypatch.setattr(fused_llama, "_LEAST", 1)
    of = randomise(FUSED[name]())
    assert_right(of, sample(of))


@pytest.mark.parametrize("name", one_quick("gemma3", *sorted(FUSED.keys() - {"gemma3"})))
@pytest.mark.parametrize("deterministic", one_quick(False, True))
def test_in_bfloat16_the_logprobs_are_those_of_the_same_weights_up_to_its_rounding(name, deterministic):
    """The own forward pass of the model in bfloat16 is further away from them."""
    of = randomise(FUSED[name]())
    of.model.to(torch.bfloat16)
    rows, exact = sample(of, deterministic=deterministic, lengths=(1, 2, 5, 30, 60) * 8), of.twin()
    exact.model.to(torch.float32)
    own, models = [], []
    for row in rows:
        prompt, answer = row.ids[: -len(row.logprobs)], row.ids[-len(row.logprobs) :]
        expected = true_logprobs(exact, prompt, answer)
        own += [abs(one - other) for one, other in zip(row.logprobs, expected, strict=True)]
        models += [abs(a - b) for a, b in zip(true_logprobs(of, prompt, answer), expected, strict=True)]
    assert sum(own) / len(own) < 0.02
    assert sum(own) < sum(models)


@pytest.mark.parametrize("kind", one_quick("float32", "bfloat16"))
@pytest.mark.parametrize("name", one_quick("tied embeddings", "llama", "gemma3"))
@pytest.mark.parametrize("layers", [None, ["q_proj"]])
def test_lora_weights_count_as_they_are_now(kind, name, layers):
    of, exact, options = FUSED[name](), FUSED[name](), LoraOptions(r=4, target_modules=layers)
    if kind == "bfloat16":
        exact.model.to(torch.bfloat16).float()
        of.model.to(torch.bfloat16)
    decoder = make_decoder(of, slots=8, deterministic=False)
    of.use_lora(options, seed=0)
    exact.use_lora(options, seed=0)
    assert can_fuse(of.model)
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[kind]
    generator = torch.Generator().manual_seed(5)
    row = live(0, [9, 10, 11])
    decoder.forget()
    decoder.step([row])
    for _ in range(2):
        change_weights(of, lambda one: one.normal_(0, 0.2, generator=generator))
        exact.load_tensors(of.copy_tensors())
        decoder.forget()
        before = len(row.ids)
        decoder.step([row])
        expected = true_logprobs(exact, row.ids[:before], row.ids[before:])
        assert row.logprobs[-1:] == pytest.approx(expected, abs=tolerance)


def test_lora_weights_far_smaller_than_a_bfloat16_of_the_base_count():
    """Merged into the base they would be rounded away."""
    of = fresh_policy()
    of.model.to(torch.bfloat16)
    of.use_lora(LoraOptions(r=4), seed=0)
    before = [row.logprobs for row in sample(of)]
    generator = torch.Generator().manual_seed(5)
    change_weights(of, lambda one: one.normal_(0, 1e-4, generator=generator), "lora_B")
    base = of.model.base_model.model.model.layers[0].self_attn.q_proj
    change = base.get_delta_weight("default")
    assert (
        (base.base_layer.weight + change).to(torch.bfloat16) == base.base_layer.weight
    ).float().mean() > 0.7
    assert [row.logprobs for row in sample(of)] != before


def test_other_models_are_asked_themselves():
    assert not can_fuse(family("Gemma2Config", head_dim=8, query_pre_attn_scalar=8).model)
    assert not can_fuse(family("LlamaConfig", hidden_act="gelu").model)
    assert not can_fuse(family("LlamaConfig", rope_parameters=LLAMA3 | {"rope_type": "dynamic"}).model)
    assert not can_fuse(family("LlamaConfig").model.to(torch.float16))
    replaced = family("LlamaConfig").model
    replaced.model.layers[0].mlp.up_proj = torch.nn.Sequential(replaced.model.layers[0].mlp.up_proj)
    assert not can_fuse(replaced)
    guarded = family("LlamaConfig").model
    guarded.forward = lambda *args, **kwargs: None
    assert not can_fuse(guarded)
