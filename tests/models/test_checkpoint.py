"""A model's files against its config, refused by name; and a base's files, recorded once and known again."""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, MixtralConfig

from etude.core.call import ChatRequest
from etude.core.errors import ImpossibleCall, RequestError
from etude.engines.answer import require_room
from etude.models.policy import Policy
from etude.models.source import keep_base, require_base
from etude.preflight.local_model import outline
from etude.store.journal import Journal
from tests.models.architectures import EXPERTS, LATENT
from tests.models.tiny_models import policy, tiny_sizes, tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}

Weights = dict[str, torch.Tensor]


def change(
    model_folder: Path,
    config: dict[str, Any] | None = None,
    weights: Callable[[Weights], object] | None = None,
) -> Path:
    """The model in a folder with another config or other weights."""
    if config is not None:
        path = model_folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights is not None:
        tensors = load_file(model_folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    return model_folder


def build_model(config: Any, model_folder: Path) -> Path:
    """A model of a config as other programs write it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_folder)
    tokenizer().save_pretrained(model_folder)
    return model_folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny Llama whose head is its embedding."""
    policy().export(tmp_path / "model")
    return tmp_path / "model"


def assert_refused(model_folder: Path, *told: str) -> None:
    """Where it is loaded, and where its files' headers alone are read."""
    for load in (Policy.load, outline):
        with pytest.raises(RequestError) as raised:
            load(str(model_folder))
        for words in told:
            assert words in str(raised.value)


def assert_taken(model_folder: Path) -> Policy:
    outline(str(model_folder))
    return Policy.load(model_folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        (None, lambda held: held.pop(UP), [f"have no {UP}"]),
        ({"tie_word_embeddings": False}, None, [f"have no {HEAD}"]),
        (GPTQ, None, ["requires optimum (`pip install optimum`)"]),
        (None, lambda held: held.update({"v_head.weight": torch.ones(1, 32)}), ["no use for: v_head.weight"]),
        ({"vocab_size": 400}, None, [f"shape of {EMBEDDING} ([", ", 32], and [400, 32] by"]),
    ],
)
def test_files_that_do_not_hold_what_the_config_says_are_refused(model_folder, config, weights, told):
    assert_refused(change(model_folder, config, weights), f"model '{model_folder}': ", *told)


def test_weights_that_are_no_numbers_are_refused_when_they_are_loaded(model_folder):
    change(model_folder, None, lambda held: held[UP].fill_(math.nan))
    with pytest.raises(RequestError, match=r"contain NaN"):
        Policy.load(model_folder)


def test_an_expert_that_is_missing_is_refused(tmp_path):
    model_folder = build_model(MixtralConfig(**tiny_sizes() | EXPERTS), tmp_path / "model")
    assert_taken(model_folder)

    def without(held: Weights) -> None:
        del held["model.layers.0.block_sparse_moe.experts.3.w2.weight"]

    assert_refused(change(model_folder, weights=without), "model.layers.0.mlp.experts.down_proj")


def test_shards_that_are_missing_are_refused(model_folder, tmp_path):
    sharded = tmp_path / "sharded"
    shutil.copytree(model_folder, sharded)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(sharded, max_shard_size="20kB")
    assert_taken(sharded)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    (sharded / index["weight_map"][UP]).unlink()
    assert_refused(sharded, f"model '{sharded}': ", index["weight_map"][UP])


def test_weights_of_pickled_files_are_held_to_the_config_as_well(model_folder):
    tensors = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    torch.save(tensors, model_folder / "pytorch_model.bin")
    assert_taken(model_folder)
    del tensors[UP]
    torch.save(tensors, model_folder / "pytorch_model.bin")
    assert_refused(model_folder, f"have no {UP}")


def test_a_shared_weight_may_be_there_once_or_twice(model_folder):
    once = assert_taken(model_folder)
    change(model_folder, weights=lambda held: held.update({HEAD: held[EMBEDDING].clone()}))
    twice = assert_taken(model_folder)
    assert twice.digest() == once.digest()
    assert twice.model.lm_head.weight is twice.model.model.embed_tokens.weight
    numbers = [
        sum(value.numel() for value in outline(str(model_folder)).model.parameters()) for _ in range(2)
    ]
    assert numbers == [sum(value.numel() for value in once.model.parameters())] * 2
    change(model_folder, weights=lambda held: held[HEAD].zero_())
    with pytest.raises(RequestError, match=f"own values, .* `tie_word_embeddings: true`, for {HEAD}"):
        Policy.load(model_folder)


def test_weights_that_a_model_is_known_to_come_with_are_no_fault(tmp_path):
    """Buffers of earlier releases, and layers of DeepSeek's that predict several tokens."""
    sizes = tiny_sizes()
    models = {
        "llama": (policy().model.config, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        "gpt2": (GPT2Config(**sizes | {"n_head": 4}), "transformer.h.0.attn.bias"),
        "deepseek": (DeepseekV3Config(**sizes | LATENT), "model.layers.61.eh_proj.weight"),
    }
    for name, (config, extra) in models.items():
        model_folder = build_model(config, tmp_path / name)
        change(model_folder, weights=lambda held, extra=extra: held.update({extra: torch.ones(4)}))
        assert_taken(model_folder)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(model_folder):
    cut = {"vocab_size": 200}
    change(model_folder, cut, lambda held: held.update({EMBEDDING: held[EMBEDDING][:200].clone()}))
    assert_refused(model_folder, f"tokenizer of '{model_folder}'", " tokens", "model 200 (", "vocab_size")


def test_a_token_that_was_added_is_refused_where_a_prompt_has_it(model_folder):
    added = copy.deepcopy(tokenizer())
    added.add_tokens(["<new>"])
    added.save_pretrained(model_folder)
    codec = assert_taken(model_folder).codec
    with pytest.raises(ImpossibleCall, match=r"id \d+ .* vocabulary of \d+; .* \(resize_token_embeddings"):
        require_room(codec, codec.template.prompt(ChatRequest(({"role": "user", "content": "<new>"},))).ids)


CODE = {"auto_map": {"AutoConfig": "mine.Config", "AutoTokenizer": ["mine.Tokenizer", None]}}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", {"hidden_act": "nonesuch"}, "(KeyError: 'nonesuch'); get them again"),
        ("config.json", CODE | {"model_type": "mine"}, "it needs code of its own"),
        ("tokenizer_config.json", json.dumps({"tokenizer_class": "Mine"} | CODE), "it needs code of its own"),
        ("generation_config.json", "{", "generation_config.json' is not a valid JSON file"),
        ("config.json", {"num_attention_heads": 3}, "number of attention heads (3)"),
        ("tokenizer.json", "{}", "(KeyError: 'added_tokens'); get them again"),
        ("tokenizer.json", "{", "line 1 column 2 (char 1)); get them again"),
        ("tokenizer.json", None, "no tokenizer can be made of its files; get its tokenizer.json"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1", "too large); "),
        ("pytorch_model.bin", "cos\nsystem\n.", "more than numbers"),
    ],
)
def test_files_that_transformers_stumbles_over_are_refused(model_folder, name, content, told):
    if isinstance(content, dict):
        change(model_folder, content)
    elif content is not None:
        (model_folder / name).write_text(content)
    if content is None or name == "pytorch_model.bin":
        (model_folder / (name if content is None else "model.safetensors")).unlink()
    assert_refused(model_folder, f"model '{model_folder}': ", told)


WEIGHTS = b"weights"
OLD, NEW = "1" * 40, "2" * 40


def in_folder(folder: Path) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    return str(folder)


def in_cache(cache: Path, commit: str, weights: str) -> str:
    """As the hub's cache: files in `blobs`, large ones by their digest, and links to them for each commit."""
    model = cache / "models--my--model"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (model / folder).mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    (model / "blobs" / "config").write_text("{}")
    (model / "blobs" / weights).write_bytes(b"not looked at")
    (model / "snapshots" / commit / "config.json").symlink_to(model / "blobs" / "config")
    (model / "snapshots" / commit / "model.safetensors").symlink_to(model / "blobs" / weights)
    return "my/model"


async def test_the_files_of_a_folder_are_recorded_once_and_known_again(tmp_path: Path, journal: Journal):
    source = in_folder(tmp_path / "base")
    assert not require_base(journal, "policy", source)
    await keep_base(journal, "policy", source)
    recorded = journal.get("base/policy")
    assert recorded["commit"] is None and recorded["source"] == source
    assert recorded["files"]["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()
    (tmp_path / "base" / "notes.json").write_text("1")  # What is added is nobody's business.
    await keep_base(journal, "policy", source)
    assert journal.get("base/policy") == recorded and require_base(journal, "policy", source)


@pytest.mark.parametrize(
    ("harm", "clause"),
    [
        (
            lambda path: path.write_bytes(b"others"),
            r"model\.safetensors has changed \(its SHA-256 is \w{12}… and",
        ),
        (lambda path: path.unlink(), r"model\.safetensors is missing"),
    ],
)
async def test_a_changed_base_is_said_by_its_file(harm, clause: str, tmp_path: Path, journal: Journal):
    source = in_folder(tmp_path / "base")
    await keep_base(journal, "policy", source)
    harm(tmp_path / "base" / "model.safetensors")
    with pytest.raises(RequestError, match=rf"llms\.policy: .* {clause}"):
        await keep_base(journal, "policy", source)


async def test_a_base_that_was_moved_is_said_to_be_away(tmp_path: Path, journal: Journal):
    source = in_folder(tmp_path / "base")
    await keep_base(journal, "policy", source)
    (tmp_path / "base").rename(tmp_path / "bases")
    with pytest.raises(RequestError, match=r"put the model's files there.*'.*bases'"):
        require_base(journal, "policy", source)


async def test_a_model_of_the_hub_is_known_by_the_names_of_its_blobs_and_its_commit(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    source = in_cache(tmp_path / "cache", OLD, "a" * 64)
    await keep_base(journal, "policy", source)
    recorded = journal.get("base/policy")
    assert recorded["commit"] == OLD and recorded["files"]["model.safetensors"] == "a" * 64
    in_cache(tmp_path / "cache", NEW, "a" * 64)  # A commit that changed none of them.
    await keep_base(journal, "policy", source)
    in_cache(tmp_path / "cache", NEW[::-1].replace("2", "3"), "b" * 64)
    with pytest.raises(RequestError, match=rf"its commit was {OLD}, and is {'3' * 40}\): model\.safetensors"):
        await keep_base(journal, "policy", source)
