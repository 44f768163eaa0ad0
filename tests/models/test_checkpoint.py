"""A model's files against its config: what is missing, unused or of another shape is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, MixtralConfig

from etude.core.call import ChatRequest
from etude.core.errors import ImpossibleCall, RequestError
from etude.inference.answer import require_room
from etude.models.policy import Policy
from etude.preflight.local_model import outline
from tests.models.architectures import EXPERTS, LATENT
from tests.models.tiny_models import policy, tiny_sizes, tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"

Weights = dict[str, torch.Tensor]


def changed(
    folder: Path, config: dict[str, Any] | None = None, weights: Callable[[Weights], object] | None = None
) -> Path:
    """The model in a folder with another config or other weights."""
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def built(config: Any, folder: Path) -> Path:
    """A model of a config as other programs write it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama whose head is its embedding."""
    policy().export(tmp_path / "model")
    return tmp_path / "model"


def assert_refused(folder: Path, *told: str) -> None:
    """Where it is loaded, and where its files' headers alone are read."""
    for load in (Policy.load, outline):
        with pytest.raises(RequestError) as raised:
            load(str(folder))
        for words in told:
            assert words in str(raised.value)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_weight_with_nan_or_infinity_is_named(folder: Path, odd: float) -> None:
    changed(folder, weights=lambda held: held[UP][0].fill_(odd))
    assert_refused(folder, f"its files have NaN or infinity in {UP}")


def assert_taken(folder: Path) -> Policy:
    outline(str(folder))
    return Policy.load(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        (None, lambda held: held.pop(UP), [f"its files have no {UP}"]),
        ({"tie_word_embeddings": False}, None, [f"its files have no {HEAD}"]),
        ({"num_hidden_layers": 3}, None, ["have no model.layers.2.", "and 4 more"]),
        (None, lambda held: held.update({"v_head.weight": torch.ones(1, 32)}), ["no use for: v_head.weight"]),
        ({"vocab_size": 400}, None, [f"have another shape of {EMBEDDING} ([", ", 32], and [400, 32] by"]),
        (
            None,
            lambda held: held.update({HEAD: torch.zeros_like(held[EMBEDDING])}),
            [f"two weights that the config says are one (tie_word_embeddings): {HEAD} and {EMBEDDING}"],
        ),
    ],
)
def test_files_that_do_not_hold_what_the_config_says_are_refused(folder, config, weights, told):
    assert_refused(changed(folder, config, weights), f"cannot load the model '{folder}'", *told)


def test_an_expert_that_is_missing_is_refused(tmp_path):
    folder = built(MixtralConfig(**tiny_sizes() | EXPERTS), tmp_path / "model")
    assert_taken(folder)

    def without(held: Weights) -> None:
        del held["model.layers.0.block_sparse_moe.experts.3.w2.weight"]

    assert_refused(changed(folder, weights=without), "model.layers.0.mlp.experts.down_proj")


def test_shards_that_are_missing_are_refused(folder, tmp_path):
    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="20kB")
    assert_taken(sharded)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    (sharded / index["weight_map"][UP]).unlink()
    assert_refused(sharded, "cannot load the model", index["weight_map"][UP])


def test_weights_of_pickled_files_are_held_to_the_config_as_well(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_taken(folder)
    del tensors[UP]
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_refused(folder, f"its files have no {UP}")


def test_a_shared_weight_may_be_there_once_or_twice(folder):
    once = assert_taken(folder)
    changed(folder, weights=lambda held: held.update({HEAD: held[EMBEDDING].clone()}))
    twice = assert_taken(folder)
    assert twice.digest() == once.digest()
    assert twice.model.lm_head.weight is twice.model.model.embed_tokens.weight
    numbers = [sum(value.numel() for value in outline(str(folder)).model.parameters()) for _ in range(2)]
    assert numbers == [sum(value.numel() for value in once.model.parameters())] * 2


def test_weights_that_a_model_is_known_to_come_with_are_no_fault(tmp_path):
    """Buffers of earlier releases, and layers of DeepSeek's that predict several tokens."""
    sizes = tiny_sizes()
    models = {
        "llama": (policy().model.config, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        "gpt2": (GPT2Config(**sizes | {"n_head": 4}), "transformer.h.0.attn.bias"),
        "deepseek": (DeepseekV3Config(**sizes | LATENT), "model.layers.61.eh_proj.weight"),
    }
    for name, (config, extra) in models.items():
        folder = built(config, tmp_path / name)
        changed(folder, weights=lambda held, extra=extra: held.update({extra: torch.ones(4)}))
        assert_taken(folder)


def _resized(folder: Path, rows: int) -> None:
    def cut(held: Weights) -> None:
        held[EMBEDDING] = held[EMBEDDING][:rows].clone()

    changed(folder, {"vocab_size": rows}, cut)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder):
    _resized(folder, 200)
    assert_refused(
        folder, f"tokenizer of '{folder}' has ", " tokens, and its model 200 (vocab_size in config"
    )


def test_a_token_that_was_added_is_refused_where_a_prompt_has_it(folder):
    added = copy.deepcopy(tokenizer())
    added.add_tokens(["<new>"])
    added.save_pretrained(folder)
    speech = assert_taken(folder).speech
    with pytest.raises(ImpossibleCall, match="its tokenizer has '<new>', for which the model has no weights"):
        require_room(speech, speech.template.prompt(ChatRequest(({"role": "user", "content": "<new>"},))).ids)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", {"num_attention_heads": 7}, "not a multiple of the number of attention heads (7)"),
        ("config.json", {"hidden_act": "nonesuch"}, "(KeyError: 'nonesuch'); get them again"),
        ("tokenizer.json", "{}", "(KeyError: 'added_tokens'); get them again"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1", "too large); get them again"),
        ("pytorch_model.bin", "cos\nsystem\n.", "damaged, or holds more than numbers; get the files again"),
    ],
)
def test_files_that_transformers_stumbles_over_are_refused(folder, name, content, told):
    if isinstance(content, dict):
        changed(folder, content)
    else:
        (folder / name).write_text(content)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    assert_refused(folder, f"cannot load the model '{folder}': ", told)
