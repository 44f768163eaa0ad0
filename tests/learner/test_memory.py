"""The memory of training by a model's numbers, against what PyTorch keeps for the gradient."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from etude.learner.head import last_hidden
from etude.learner.memory import ModelNumbers
from etude.learner.packed import tree_hidden
from etude.learner.tree import TreeLayout, token_tree
from etude.models import memory
from etude.models.policy import LoraOptions
from tests.models.tiny_models import fresh_policy

TOKENS = 32


def kept(policy, is_lean: bool) -> float:
    """Bytes that a layer keeps for each token."""
    own = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}
    storages, ids = {}, torch.zeros(TOKENS, dtype=torch.long)
    tree = token_tree([ids.tolist()])
    layout = TreeLayout.of(tree, ids.device, np.arange(TOKENS))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        if is_lean:
            tree_hidden(policy.model, ids, layout)
        else:
            last_hidden(policy.model, ids[None])
    return sum(map(len, storages.values())) / TOKENS / policy.model.config.num_hidden_layers


@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_a_layer_keeps(is_lora: bool, is_lean: bool, dtype: torch.dtype):
    policy = fresh_policy()
    policy.model.to(dtype)
    if is_lora:
        policy.use_lora(LoraOptions(1), seed=0)
    assert ModelNumbers.of(policy).kept_by_a_layer(is_lean=is_lean) == pytest.approx(
        kept(policy, is_lean), rel=0.15
    )


def test_weights_gradients_moments_and_copies_are_counted_by_their_bytes():
    numbers = ModelNumbers.of(fresh_policy())
    count = numbers.trained
    whole = numbers.training(on_gpu=True, reference=True)
    assert (whole.weights, whole.gradients, whole.moments, whole.copies) == (
        4 * count,
        4 * count,
        8 * count,
        4 * count,
    )
    assert whole.total == (4 + 4 + 8 + 4) * count
    half = replace(numbers, size=2).training(on_gpu=True)
    assert half.copies == 4 * count, "masters in float32"
    assert numbers.training(on_gpu=True, parts=4).moments == 2 * count


def test_the_free_memory_of_a_gpu_counts_what_torch_holds_and_does_not_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (1000, 5000)}[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert memory.available_memory("cuda:1") == 1100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return it by themselves")
def test_what_was_freed_goes_back_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(25_000) for _ in range(2_000)]
    last = blocks.pop()  # What lies above it would go by itself.
    blocks.clear()
    before = resident()
    memory.give_back_freed()
    assert resident() < before - 100_000_000
    del last
