"""A policy: loading, versions, the base to go back to, LoRA weights, export."""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from etude.config.finetuning import LoraOptions
from etude.core.call import ChatRequest
from etude.core.errors import EngineError, RequestError
from etude.core.job import ModelVersion
from etude.models import weights
from etude.models.device import choose_device, choose_dtype, limit_threads, usable_cores
from etude.models.policy import Policy
from etude.models.weights import digest, load_tensors, save_tensors
from etude.store.files import WEIGHTS_FILE, require_as_written
from tests.models.tiny_models import change_weights, chatml_policy, fresh_policy, says, user

IDS = torch.tensor([[9, 10, 11, 12, 13]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_an_exported_policy_is_loaded_as_it_was(tmp_path):
    of = chatml_policy()
    of.export(tmp_path / "model")
    loaded = Policy.load(tmp_path / "model", device="cpu")
    assert torch.equal(logits(loaded.model), logits(of.model))
    assert loaded.stop_ids == of.stop_ids
    assert len(loaded.stop_ids) == 2
    assert loaded.max_context == 512
    request = ChatRequest((user("what is 1 plus 2?"), says("3"), user("plus 4?")))
    assert loaded.template.prompt(request) == of.template.prompt(request)


def test_models_are_loaded_in_several_threads_at_once(tmp_path):
    chatml_policy().export(tmp_path / "model")

    def load(_):
        policy = Policy.load(tmp_path / "model", device="cpu")
        policy.use_lora(LoraOptions(r=4), seed=0)
        return policy.digest()

    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(load, range(8))}) == 1


def test_a_gguf_file_is_loaded_with_the_standard_error_that_other_threads_write_to(monkeypatch):
    def load(*_: object, **options: object) -> None:
        raise RuntimeError(str(sys.stderr is before))

    before = sys.stderr
    monkeypatch.setattr(weights, "model_class", lambda config: SimpleNamespace(from_pretrained=load))
    with pytest.raises(RuntimeError, match="True"):
        weights.load_model(None, "model", gguf_file="model.gguf")


def test_lora_weights_start_as_the_identity_and_alone_are_trained():
    of = fresh_policy()
    before = logits(of.model)
    of.use_lora(LoraOptions(r=4), seed=0)
    assert torch.equal(logits(of.model), before)
    assert of.is_lora
    assert all("lora_" in name for name in of.trainable())
    again = fresh_policy()
    again.use_lora(LoraOptions(r=4), seed=0)
    other = fresh_policy()
    other.use_lora(LoraOptions(r=4), seed=1)
    assert again.digest() == of.digest() != other.digest()
    weights = of.weights_id
    of.use_lora(LoraOptions(r=8), seed=0)
    assert of.weights_id == weights


def test_within_as_base_the_weights_are_the_bases_and_then_exactly_what_they_were():
    of = fresh_policy()
    of.keep_base()
    base = of.digest()
    change_weights(of, lambda one: one.add_(0.1))
    of.mark_changed(1)
    trained = of.digest()
    with pytest.raises(KeyError), of.as_base():
        assert digest(of.trainable()) == base
        raise KeyError
    assert digest(of.trainable()) == trained
    assert of.version == 1


def test_a_saved_version_is_adopted_and_the_base_as_well(tmp_path):
    trained, of = fresh_policy(), fresh_policy()
    of.keep_base()
    base = ModelVersion(number=0, location="tiny", digest=of.digest())
    change_weights(trained, lambda one: one.add_(0.1))
    save_tensors(trained.trainable(), tmp_path / WEIGHTS_FILE)
    version = ModelVersion(number=3, location=str(tmp_path), digest=trained.digest())
    weights = of.weights_id
    of.adopt(version)
    assert (of.version, of.digest()) == (3, trained.digest())
    assert of.weights_id == weights + 1
    of.adopt(version)
    assert of.weights_id == weights + 1
    of.adopt(base)
    assert (of.version, of.digest()) == (0, base.digest)


def test_a_base_of_other_weights_is_refused():
    of = fresh_policy()
    with pytest.raises(EngineError, match=f"elsewhere .* version 0's: .* expected {'0' * 32}"):
        of.adopt(ModelVersion(number=0, location="elsewhere", digest="0" * 32))


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    of = fresh_policy()
    before = of.digest()
    names = dict(of.copy_tensors())
    first = next(iter(names))
    with pytest.raises(EngineError, match=f"differing: .*{first}"):
        of.load_tensors({name: value for name, value in names.items() if name != first})
    with pytest.raises(EngineError, match=f"differing: .*{first}"):
        of.load_tensors(names | {first: torch.zeros(1)})
    of.mark_changed(0)
    assert of.digest() == before


def test_a_model_without_an_end_of_turn_is_refused():
    of = fresh_policy()
    of.model.config.eos_token_id = of.model.generation_config.eos_token_id = None
    words = of.tokenizer
    of.model.config.eos_token_id = [len(words) + 5]
    assert Policy(of.model, words, "tiny", of.device).stop_ids == {words.eos_token_id}
    end, words.eos_token = words.eos_token, None
    try:
        with pytest.raises(RequestError, match=r"\(eos_token_id\) .* vocabulary of \d+, only"):
            Policy(of.model, words, "tiny", of.device)
    finally:
        words.eos_token = end


def test_apples_gpus_are_taken_in_float32(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert choose_device() == choose_device("mps") == torch.device("mps")
    assert choose_dtype("auto", choose_device(), 1000) is torch.float32


def test_devices_and_types_that_are_not_there_are_a_wrong_request():
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(RequestError, match=r"'quantum' .* use auto, cpu"):
        choose_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(RequestError, match=r"'cuda:1' .* device: auto .*cpu"):
            choose_device("cuda:1")
    assert choose_dtype("auto", torch.device("cpu"), 1000) is torch.float32
    assert choose_dtype("float32", torch.device("cpu"), 10**9) is torch.float32
    assert choose_dtype("auto", torch.device("cuda"), 1000) is torch.bfloat16
    assert choose_dtype("float16", torch.device("cpu"), 1000) is torch.float16
    with pytest.raises(RequestError, match="dtype 'int8' is not known"):
        choose_dtype("int8", torch.device("cpu"), 1000)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True, "amx_bf16": False, "cpu_name": "AMD EPYC 9R14"}, torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": False, "cpu_name": "Intel Xeon"}, torch.float32),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_large_models_are_in_bfloat16_on_cpus_that_multiply_it_faster(monkeypatch, capabilities, dtype):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities, raising=False)
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu, 10_000_000) is dtype
    assert choose_dtype("auto", cpu, 9_999_999) is torch.float32


def test_large_models_have_all_cores_unless_the_environment_says_otherwise(monkeypatch):
    counts = []
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(135_000_000)
    limit_threads(120_000)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    limit_threads(135_000_000)
    assert counts == [usable_cores(), 1]


DIGEST = "b6b4aaf4819242d3c2265565c1a58bb767ba2d0b115908aa4d86b9fc3dfa548f"


def test_a_file_has_its_sum_beside_it(tmp_path: Path):
    numbers = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    tensors = {"b.weight": numbers, 'ä "q"': numbers.clone().T, "none": numbers[:0]}
    tensors |= {"half": numbers.bfloat16(), "step": torch.tensor(3.0), "wide": numbers.double()}
    path = tmp_path / "some.safetensors"
    save_tensors(tensors, path)
    require_as_written(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in path.with_name("SHA256SUMS").read_text()
    assert digest(load_tensors(path)) == digest(tensors)


def test_a_digest_is_that_of_names_and_values():
    tensors = {"b": torch.zeros(2), "a": torch.ones(3, dtype=torch.bfloat16)}
    # Runs on disk have digests of this kind: another one would be taken for other weights.
    assert digest(tensors) == digest(dict(reversed(tensors.items()))) == DIGEST
    assert digest({**tensors, "b": torch.tensor([0.0, 1e-30])}) != digest(tensors)
    assert digest({**tensors, "b": torch.zeros(1, 2)}) != digest(tensors)
