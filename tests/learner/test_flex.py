"""FlexAttention over token trees, as it is defined, against the tiles of the CPU; and its compilation.

On a CPU torch runs the definition, in front of which it refuses gradients that it has.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from etude.algorithms.grpo import Grpo
from etude.learner import kernels
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.packed import tree_hidden, why_not_trees
from etude.learner.tree import TreeLayout, token_tree
from etude.learner.tree_attention import _attend
from tests.learner.gradients import assert_same, batch_of, gradient_of, train
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy

CPU = torch.device("cpu")
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"num_attention_heads": 6, "hidden_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 24, "sliding_window": 6, "num_hidden_layers": 3}),
}


@pytest.fixture
def with_gradients(monkeypatch):
    """Let torch's definition be differentiated."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)


def tree_of(count, seed=3):
    return token_tree([one.ids for one in forest(seed, count)])


def chain(length):
    return token_tree([list(range(length))])


def layout_of(tree, kernel, needed=None):
    needed = np.arange(len(tree)) if needed is None else needed
    return TreeLayout.of(tree, CPU, needed, most=16, kernel=kernel)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("tree", [chain(1), chain(128), chain(129), tree_of(40), tree_of(90, 5)], ids=len)
def test_the_block_mask_is_the_one_that_torch_makes(tree, window):
    layout = layout_of(tree, "plain flex")
    size = len(layout.ends_N)
    assert size % 128 == 0 and (0 <= size - len(tree) < 128 or size == 256)

    def attends(batch, head, query, key):
        return layout.attends(query, key, window)

    made, wanted = layout.block_mask(window), create_block_mask(attends, None, None, size, size, device="cpu")
    assert torch.equal(made.to_dense(), wanted.to_dense())
    assert made.shape == wanted.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(wanted, f"{kind}_num_blocks")
        assert torch.equal(getattr(made, f"{kind}_num_blocks"), counts)
        ours, theirs = getattr(made, f"{kind}_indices"), getattr(wanted, f"{kind}_indices")
        for row, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(ours[0, 0, row, :count], theirs[0, 0, row, :count])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0), (4, 2.0)])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (6, 2, 8), (3, 3, 24), (14, 2, 8)])
def test_it_is_the_attention_of_the_tiles(with_gradients, window, softcap, heads, groups, width):
    tree, draw = tree_of(40), torch.Generator().manual_seed(heads)
    layouts = [layout_of(tree, kernel) for kernel in ("blocks", "plain flex")]
    size = len(layouts[1].ends_N)
    inputs = [torch.randn(1, n, size, width, generator=draw) for n in (heads, groups, groups)]
    weights = torch.randn(1, len(tree), heads, width, generator=draw)
    module = fresh_policy().model.model.layers[0].self_attn
    found = []
    for layout in layouts:
        leaves = [one[:, :, : len(layout.ends_N)].clone().requires_grad_() for one in inputs]
        out, _ = _attend(
            module, *leaves, None, tree=layout, scaling=0.3, sliding_window=window, softcap=softcap
        )
        grads = torch.autograd.grad((out[:, : len(tree)] * weights).sum(), leaves)
        found.append([out[:, : len(tree)], *(grad[:, :, : len(tree)] for grad in grads)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_models_have_the_same_hidden_states_and_gradients(with_gradients, name):
    config, changes = FAMILIES[name]
    of = family(config, **changes)
    assert why_not_trees(of.model, "plain flex") is None
    tree = tree_of(30, 7)
    needed = np.flatnonzero(np.arange(len(tree)) % 3)
    found = []
    for kernel in ("blocks", "plain flex"):
        hidden = tree_hidden(of.model, torch.from_numpy(tree.ids), layout_of(tree, kernel, needed))
        assert len(hidden) == len(needed)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        loss = (hidden * weights).sum() / len(needed)
        parameters = {name: value for name, value in of.trainable().items() if "lm_head" not in name}
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        zeros = [torch.zeros_like(one) for one in parameters.values()]
        filled = [zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True)]
        found.append((float(loss), dict(zip(parameters, filled, strict=True))))
    assert_same(found[1], found[0])


def test_sizes_do_not_compile_it_anew():
    """One size, and then any, for each kind of mask. More than that would wear out torch's patience."""
    counter = CompileCounter()
    compiled = torch.compile(kernels._flex, backend=counter, fullgraph=True)
    compiled_for = {}
    for window in (None, 6, 7, 8):
        for length in (100, 200, 400, 700, 900):
            layout = layout_of(chain(length), "plain flex")
            size = len(layout.ends_N)
            query, key, value = (torch.randn(1, heads, size, 16) for heads in (4, 2, 2))
            with torch.no_grad():
                compiled(query, key, value, layout.block_mask(window), 0.25, None)
        compiled_for[window] = counter.frame_count
    assert compiled_for[None] <= 2
    assert compiled_for[6] <= 4
    assert compiled_for[8] == compiled_for[6]


def test_where_it_does_not_run_models_are_trained_padded_and_it_is_said_why(monkeypatch):
    of, batch = fresh_policy(), batch_of(forest(1, 30))
    monkeypatch.setattr("etude.learner.learner.why_not_trees", lambda model: why_not_trees(model, "flex"))
    learner = Learner(of, LearnerOptions(learning_rate=0.0))
    train(learner, batch, Grpo())
    assert "FlexAttention does not run here" in learner.note
    assert "NotImplementedError" in learner.note
    assert_same(gradient_of(of, batch, Grpo()), gradient_of(of, batch, Grpo(), packing="padded"))
