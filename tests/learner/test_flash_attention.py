"""Attention level by level: the blocks, by kernels' definition here and by CUDA's own on a GPU."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given

from etude.algorithms.grpo import Grpo
from etude.learner import tree_attention
from etude.learner.passes import tree_hidden, tree_refusal
from etude.learner.tree import TreeLayout, make_levels, token_tree
from etude.models.device import choose_device
from tests.learner.gradients import assert_same, forest, get_gradient, to_batch
from tests.learner.test_tree import SEQUENCES
from tests.learner.test_tree_llama import KNOWN, cosine, make_policy
from tests.models.tiny_models import family
from tests.support import one_quick

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def ranges(level, size):
    """The places of queries and keys in each range."""
    queries, keys = (torch.arange(size) if each is None else each for each in (level.queries_Q, level.keys_K))
    for index in range(len(level.query_ends) - 1):
        first, end = level.query_ends[index : index + 2].tolist()
        low, high = level.key_ends[index : index + 2].tolist()
        yield queries[first:end].tolist(), keys[low:high].tolist()


@given(SEQUENCES.filter(any))
def test_each_token_meets_each_that_it_sees_once(sequences):
    tree, found = token_tree(sequences), Counter()
    for level in make_levels(tree, CPU):
        lengths = [(len(queries), len(keys)) for queries, keys in ranges(level, len(tree))]
        assert level.longest == tuple(map(max, zip(*lengths, strict=True)))
        for queries, keys in ranges(level, len(tree)):
            causal = level.queries_Q is None
            found.update((q, k) for q in queries for k in keys if k <= q or not causal)
    assert found == Counter((q, k) for q in range(len(tree)) for k in range(q + 1) if q < tree.ends[k])


def attend_plainly(query, key, value, level, scale):
    """The kernel by its definition, with a gradient."""
    out, sums = torch.zeros_like(query), torch.zeros(query.shape[1], len(query))
    more = query.shape[1] // key.shape[1]
    bounds = zip(pairwise(level.query_ends.tolist()), pairwise(level.key_ends.tolist()), strict=True)
    for (start, stop), (low, high) in bounds:
        q_HQD = query[start:stop].transpose(0, 1)
        k_HSD, v_HSD = (x[low:high].repeat_interleave(more, 1).transpose(0, 1) for x in (key, value))
        scores = (q_HQD @ k_HSD.transpose(1, 2) * scale).float()
        if level.queries_Q is None:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1) > 0, -torch.inf)
        sums[:, start:stop] = scores.logsumexp(-1)
        out[start:stop] = (scores.softmax(-1).to(v_HSD.dtype) @ v_HSD).transpose(0, 1)
    return out, sums


def back_plainly(grad, query, key, value, out, sums, level, scale):
    """The kernel's backward pass: `out` and `sums` may be of more keys than these."""
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        own, own_sums = attend_plainly(*leaves, level, scale)
        share = (own_sums - sums).exp().t()
        delta = (grad * out).sum(-1)
        # d(share · own)/d(own_sums) along grad, with the total's own sum taken off as the kernel does.
        loss = (share.detach()[..., None] * own * grad).sum()
        loss = loss + (share.detach() * ((own.detach() * grad).sum(-1) - delta) * own_sums.t()).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.fixture
def on_this_cpu(monkeypatch):
    monkeypatch.setattr(tree_attention, "takes_flash", lambda x, size: True)
    monkeypatch.setattr(tree_attention, "_flash", attend_plainly)
    monkeypatch.setattr(tree_attention, "_flash_back", back_plainly)


FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"num_attention_heads": 6, "hidden_size": 48}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 24, "sliding_window": 600, "num_hidden_layers": 3}),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", one_quick(False, True))
def test_the_gradient_is_that_of_the_chunks(request, name, checkpointing):
    config, changes = FAMILIES[name]
    of, batch = family(config, **changes), to_batch(forest(4, 16))
    wanted = get_gradient(of, batch, Grpo())
    request.getfixturevalue("on_this_cpu")
    assert tree_refusal(of.model) is None
    assert_same(get_gradient(of, batch, Grpo(), gradient_checkpointing=checkpointing), wanted)


def test_kernels_that_are_wrong_are_found_out_by_results_and_by_gradients(on_this_cpu, monkeypatch, caplog):
    tried = tree_attention.why_wrong.__wrapped__
    assert tried(CPU, torch.bfloat16, 16) is None

    def off(*args):
        of_query, of_key, of_value = back_plainly(*args)
        return of_query, of_key * 1.1, of_value

    monkeypatch.setattr(tree_attention, "_flash_back", off)
    assert "off by" in tried(CPU, torch.bfloat16, 16)
    monkeypatch.setattr(tree_attention, "_flash", lambda *args: torch.empty(2) @ torch.empty(3))
    assert "inconsistent" in tried(CPU, torch.bfloat16, 16)
    assert len(caplog.messages) == 2


def test_a_level_is_one_call_however_many_spans_it_has(on_this_cpu, monkeypatch):
    calls = []
    monkeypatch.setattr(tree_attention, "_flash", lambda *args: calls.append(1) or attend_plainly(*args))
    of = family("LlamaConfig")
    stems = [[7 + stem, 9, 11] for stem in range(5)]
    tree = token_tree([[*stem, 20 + end, 30] for stem in stems for end in range(6)])
    layout = TreeLayout.build(tree, CPU, np.arange(len(tree)))
    assert len(layout.levels) == 2
    with torch.no_grad():
        tree_hidden(of.model, torch.from_numpy(tree.ids), layout)
    assert len(calls) == 2 * of.model.config.num_hidden_layers


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_gpu_has_the_gradient_of_a_cpu(name, lora, dtype):
    batch = to_batch(forest(4, 12))
    _, exact = get_gradient(make_policy(name, lora), batch, Grpo())
    of = make_policy(name, lora, dtype)
    of.device = choose_device("cuda")
    of.model.to(of.device)
    found = {key: value.cpu() for key, value in get_gradient(of, batch, Grpo())[1].items()}
    assert cosine(found, exact) > (0.999999 if dtype == torch.float32 else 0.998)
