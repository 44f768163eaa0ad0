"""Bases of four and eight bits: how they are loaded, who is refused, and that LoRA weights on them learn."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.backends.local_adapter import LocalAdapter
from etude.backends.local_config import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import CapabilityError, MissingExtraError, RequestError
from etude.core.sample import Sample
from etude.inference.decoder import make_decoder
from etude.inference.local import LocalLlmConfig
from etude.learner.lean import is_lean
from etude.learner.learner import Learner, LearnerOptions
from etude.models import quantized
from etude.models.architecture import without_lora
from etude.models.eight_bits import EightBitWeights
from etude.models.policy import LoraOptions, Policy
from etude.models.tiny import TinyShape, build_policy
from etude.preflight.finding import Findings
from etude.preflight.local_model import check_local_model
from tests.inference.test_decoder import assert_right, rows_of_many_lengths, run
from tests.learner.gradients import assert_same, batch_of, gradient_of, train
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy, loud, tokenizer

CUDA = torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    fresh_policy().export(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_loaded_as_nf4_with_scales_that_are_quantised_too():
    arguments = quantized.four_bits(torch.bfloat16, CUDA)
    config = arguments["quantization_config"].to_dict()
    assert arguments["device_map"] == {"": CUDA}
    assert (config["load_in_4bit"], config["load_in_8bit"]) == (True, False)
    assert (config["bnb_4bit_quant_type"], config["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert config["bnb_4bit_compute_dtype"] == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_are_refused_by_name(device):
    with pytest.raises(RequestError, match=f"needs a CUDA device.*'{device}': take '8bit', leave"):
        quantized.require_quantization("4bit", torch.device(device))
    quantized.require_quantization("8bit", torch.device(device))


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[bnb\]"):
        quantized.require_quantization("4bit", CUDA)


def test_nothing_is_loaded_where_it_is_refused(folder):
    with pytest.raises(RequestError, match="needs a CUDA device"):
        Policy.load(folder, device="cpu", quantization="4bit")


def checked(folder, lora, quantization="4bit"):
    llm = LocalLlmConfig(model=folder, device="cpu", dtype="float32", quantization=quantization)
    return check_local_model("policy", llm, str(folder), LocalAdapterConfig(lora=lora), [], Findings())


def test_the_check_of_a_config_refuses_too_and_counts_the_bytes_of_weights(folder, monkeypatch):
    with pytest.raises(RequestError, match="needs a CUDA device"):
        checked(folder, {"r": 4})
    with pytest.raises(RequestError, match="`quantization: 8bit` trains LoRA weights only"):
        checked(folder, None, "8bit")
    monkeypatch.setattr("etude.preflight.local_model.require_quantization", lambda *_: None)
    with pytest.raises(RequestError, match="`quantization: 4bit` trains LoRA weights only"):
        checked(folder, None)
    assert checked(folder, {"r": 4}).bytes_per_parameter == 0.5
    size, of = checked(folder, {"r": 4}, "8bit"), Policy.load(folder, device="cpu", quantization="8bit")
    parameters = {name: one for name, one in of.model.named_parameters() if not name.endswith(".step")}
    assert size.bytes_per_parameter * size.parameters == sum(one.nbytes for one in parameters.values())


async def test_all_weights_of_such_a_model_are_never_trained_nor_merged(tmp_path):
    of = fresh_policy()
    of.model.is_quantized = True
    adapter = LocalAdapter(LocalAdapterConfig(), of, tmp_path, seed=0)
    with pytest.raises(CapabilityError, match="`quantization` trains LoRA weights only: set 'lora'"):
        await adapter.initialize(FinetuneConfig())
    with pytest.raises(RequestError, match="not merged: load the model without 'quantization'"):
        of.export(tmp_path / "out")


FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
}


def on_eight_bits(name, folder, dtype="float32"):
    """A policy with a base of eight bits under LoRA weights, and one with the same numbers in float32."""
    kind, changes = FAMILIES[name]
    whole = loud(family(kind, **changes))
    whole.export(folder)
    of = Policy.load(folder, device="cpu", dtype=dtype, quantization="8bit")
    with torch.no_grad():
        for name, layer in of.model.named_modules():
            if isinstance(layer, EightBitWeights):
                before = whole.model.get_submodule(name).weight
                assert float((layer.widened() - before).abs().max()) <= float(layer.step.max()) * 0.501
                before.copy_(layer.widened())
    for each in (of, whole):
        each.use_lora(LoraOptions(r=2, alpha=4), 1)
        chance = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in each.trainable().values():
                parameter.normal_(0, 0.1, generator=chance)
    return of, whole


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_on_eight_bits_is_that_of_the_same_numbers_in_float32(tmp_path, name, packing):
    of, whole = on_eight_bits(name, tmp_path)
    assert is_lean(without_lora(of.model)) == (name != "gemma2")
    assert of.is_quantized and {one.dtype for one in of.trainable().values()} == {torch.float32}
    assert all("lora_" in name for name in of.trainable())
    batch = batch_of(forest(7, 30))
    expected = gradient_of(whole, batch, Grpo(), packing=packing)
    assert_same(gradient_of(of, batch, Grpo(), packing=packing), expected)
    again = gradient_of(of, batch, Grpo(), packing=packing, gradient_checkpointing=True)
    assert_same(again, expected)
    with pytest.raises(RequestError, match="not merged: load the model without 'quantization'"):
        of.export(tmp_path / "out")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_on_eight_bits_is_what_is_trained(tmp_path, name):
    of, _ = on_eight_bits(name, tmp_path)
    for policy in (of, of.beside(), of.twin()):
        rows, until = rows_of_many_lengths(5, tokens=5)
        run(make_decoder(policy, slots=8, deterministic=False), rows, until)
        assert_right(policy, rows, 1e-3)


def test_a_policy_on_eight_bits_differs_from_its_engine_by_less_than_a_thousandth_of_a_nat(tmp_path):
    for dtype in ("float32", "bfloat16"):
        of, _ = on_eight_bits("llama", tmp_path / dtype, dtype)
        decoder = make_decoder(of, slots=8, deterministic=False)
        assert decoder._fused is not None
        rows, until = rows_of_many_lengths(5, tokens=8)
        given = [len(row.ids) for row in rows]
        run(decoder, rows, until)
        samples = [
            Sample(
                tuple(row.ids),
                (False,) * start + (True,) * len(row.logprobs),
                advantages=(0.0,) * start + (1.0,) * len(row.logprobs),
                logprobs=(0.0,) * start + tuple(row.logprobs),
            )
            for start, row in zip(given, rows, strict=True)
        ]
        metrics = train(Learner(of, LearnerOptions(learning_rate=0.0)), batch_of(samples), Grpo())
        assert abs(metrics["mismatch_kl"]) < 1e-3


def test_a_base_of_eight_bits_takes_a_byte_a_weight_and_is_shared(tmp_path):
    of, whole = on_eight_bits("llama", tmp_path)
    small, large = (each.model.base_model.model.model.layers[0].mlp.up_proj.weight for each in (of, whole))
    assert small.nbytes == large.nbytes / 4
    for other in (of.twin(), of.beside()):
        shared = other.model.base_model.model.model.layers[0].mlp.up_proj.weight
        assert shared.data_ptr() == small.data_ptr()


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra bnb")
def test_lora_weights_on_four_bits_are_sampled_and_trained(tmp_path, monkeypatch):
    """On a CPU, for which bitsandbytes has a slower way to compute the same, for widths of whole blocks."""
    whole = loud(build_policy(tokenizer(), 0, TinyShape(intermediate_size=128, max_context=512)))
    whole.export(tmp_path)
    monkeypatch.setattr("etude.models.policy.require_quantization", lambda *_: None)
    of = Policy.load(tmp_path, device="cpu", quantization="4bit")
    assert of.is_quantized
    assert not of.trainable()
    small, large = (each.model.model.layers[0].mlp.up_proj.weight.nbytes for each in (of, whole))
    assert small == large / 8
    other = of.beside()
    of.use_lora(LoraOptions(r=2, alpha=4), 1)
    assert all("lora_" in name for name in of.trainable())
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in of.trainable().values():
            parameter.normal_(0, 0.1, generator=chance)
    for policy in (of, other):
        rows, until = rows_of_many_lengths(5, tokens=5)
        run(make_decoder(policy, slots=8, deterministic=False), rows, until)
        assert_right(policy, rows, 2e-5)
    batch = batch_of(forest(7, 12))
    assert_same(gradient_of(of, batch, Grpo()), gradient_of(of, batch, Grpo(), packing="padded"), 1e-5)
