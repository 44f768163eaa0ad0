"""Bases of four bits: how they are loaded, who is refused, and that LoRA weights on them learn."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.backends.capabilities import LocalAdapterConfig
from etude.backends.local_adapter import LocalAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import CapabilityError, RequestError
from etude.inference.decoder import make_decoder
from etude.inference.local import LocalLlmConfig
from etude.models import architecture
from etude.models.policy import LoraOptions, Policy
from etude.models.tiny import TinyShape, build_policy
from etude.preflight.finding import Findings
from etude.preflight.local_model import check_local_model
from tests.inference.test_decoder import assert_right, rows_of_many_lengths, run
from tests.learner.gradients import assert_same, batch_of, gradient_of
from tests.learner.trees import forest
from tests.models.tiny_models import fresh_policy, loud, tokenizer

CUDA = torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    fresh_policy().export(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_loaded_as_nf4_with_scales_that_are_quantised_too():
    arguments = architecture.four_bits(torch.bfloat16, CUDA)
    config = arguments["quantization_config"].to_dict()
    assert arguments["device_map"] == {"": CUDA}
    assert (config["load_in_4bit"], config["load_in_8bit"]) == (True, False)
    assert (config["bnb_4bit_quant_type"], config["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert config["bnb_4bit_compute_dtype"] == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_are_refused_by_name(device):
    with pytest.raises(RequestError, match=f"needs a CUDA device.*'{device}': leave"):
        architecture.require_four_bits(torch.device(device))


def checked(folder, lora):
    llm = LocalLlmConfig(model=folder, device="cpu", dtype="float32", quantization="4bit")
    return check_local_model("policy", llm, str(folder), LocalAdapterConfig(lora=lora), [], Findings())


def test_the_check_of_a_config_refuses_too_and_counts_the_bytes_of_weights(folder, monkeypatch):
    with pytest.raises(RequestError, match="needs a CUDA device"):
        checked(folder, {"r": 4})
    monkeypatch.setattr("etude.preflight.local_model.require_four_bits", lambda *_: None)
    with pytest.raises(RequestError, match="`quantization: 4bit` trains LoRA weights only"):
        checked(folder, None)
    checked(folder, {"r": 4})
    monkeypatch.setattr("etude.preflight.local_model.available_memory", lambda *_: 1)
    monkeypatch.setattr("etude.preflight.local_model.shown_bytes", str)
    needed = []
    for quantization in ("4bit", None):
        findings = Findings()
        llm = LocalLlmConfig(model=folder, device="cpu", dtype="float32", quantization=quantization)
        check_local_model("policy", llm, str(folder), None, [], findings)
        needed.append(int(findings.of("warning")[-1].detail.split()[2]))
    assert needed[1] == 8 * needed[0]


async def test_all_weights_of_such_a_model_are_never_trained_nor_merged(tmp_path):
    of = fresh_policy()
    of.model.is_quantized = True
    adapter = LocalAdapter(LocalAdapterConfig(), of, tmp_path, seed=0)
    with pytest.raises(CapabilityError, match="`quantization` trains LoRA weights only: set 'lora'"):
        await adapter.initialize(FinetuneConfig())
    with pytest.raises(RequestError, match="not merged: load the model without 'quantization'"):
        of.export(tmp_path / "out")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra bnb")
def test_lora_weights_on_four_bits_are_sampled_and_trained(tmp_path, monkeypatch):
    """On a CPU, for which bitsandbytes has a slower way to compute the same, for widths of whole blocks."""
    whole = loud(build_policy(tokenizer(), 0, TinyShape(intermediate_size=128, max_context=512)))
    whole.export(tmp_path)
    monkeypatch.setattr("etude.models.policy.require_four_bits", lambda *_: None)
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
