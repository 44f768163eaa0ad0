"""Token trees through a model: the gradients of padding, for every family; and FlexAttention over them.

On a CPU torch runs the definition of FlexAttention, in front of which it refuses gradients that it has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.learner import kernels, tree
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.padding import trained_units
from etude.learner.tree import TreeLayout, token_tree
from etude.learner.tree_attention import _attend
from etude.learner.tree_passes import PackedStep, tree_hidden, tree_refusal
from tests.learner.gradients import assert_same, forest, get_gradient, to_batch, train
from tests.models.tiny_models import family, fresh_policy, policy
from tests.support import one_quick

OBJECTIVES = {
    "grpo": Grpo(),
    "grpo by sequence": Grpo(aggregation="sequence"),
    "grpo by constant": Grpo(aggregation="constant"),
    "gspo": Grpo(ratio="sequence", aggregation="sequence"),
    "cispo": Grpo(surrogate="cispo"),
    "grpo with kl": Grpo(beta=0.3),
    "grpo truncated by token": Grpo(correction="truncate", correction_cap=1.5),
    "grpo masked": Grpo(correction="mask"),
    "dpo": Dpo(beta=0.5),
    "dpo by length": Dpo(loss_type="sigmoid_norm", label_smoothing=0.2),
    "ipo": Dpo(loss_type="ipo"),
    "dpo against the base": Dpo(beta=0.5, label_smoothing=0.1, reference="base"),
    "sft": Supervised(),
}

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {}),
}


def units_for(objective, sequences):
    """Pairs for preferences."""
    if isinstance(objective, Dpo):
        return list(zip(sequences[0::2], sequences[1::2], strict=True))
    return sequences


def both(of, batch, objective, **options):
    """Loss and gradient of the packed step, and of the padded one."""
    assert PackedStep(trained_units(batch)).pays
    assert tree_refusal(of.model) is None
    return (
        get_gradient(of, batch, objective, packing=packing, **(options if packing == "tree" else {}))
        for packing in ("tree", "padded")
    )


def moved(of):
    """A policy whose weights are no longer those of its base."""
    of.keep_base()
    with torch.no_grad():
        for parameter in of.trainable().values():
            parameter.mul_(1.02)
    return of


QUICK = {"gspo", "cispo", "grpo with kl", "dpo against the base", "sft"}


@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *one_quick("grpo", *sorted(OBJECTIVES.keys() - QUICK - {"grpo"}))]
)
def test_every_objective_has_the_gradient_of_padding(name):
    objective = OBJECTIVES[name]
    of = moved(fresh_policy())
    batch = to_batch(units_for(objective, forest(1, 12, temperatures=(1.0, 0.7))))
    assert_same(*both(of, batch, objective))


@pytest.mark.parametrize(
    "name", [*("gemma3", "qwen3"), *one_quick("phi3", *sorted(FAMILIES.keys() - {"gemma3", "qwen3", "phi3"}))]
)
def test_every_family_has_the_gradient_of_padding(name):
    config, changes = FAMILIES[name]
    of = family(config, **changes)
    batch = to_batch(forest(7, 14))
    assert max(len(unit[0].ids) for unit in batch) > 20
    assert_same(*both(of, batch, Grpo()))


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_how_a_tree_is_cut_changes_nothing(name):
    objective = OBJECTIVES[name]
    batch = to_batch(units_for(objective, forest(3, 16)))
    whole, padded = both(policy(), batch, objective)
    assert_same(whole, padded)
    for token_budget in (1, 30, 60):
        cut = get_gradient(policy(), batch, objective, packing="tree", token_budget=token_budget)
        assert_same(cut, padded)


def test_long_prompts_are_looked_back_at_over_many_tiles():
    prompt = tuple(10 + at % 200 for at in range(300))
    sequences = [
        replace(
            one,
            ids=prompt + one.ids,
            mask=(False,) * 300 + one.mask,
            advantages=(0.0,) * 300 + one.advantages,
            logprobs=(0.0,) * 300 + one.logprobs,
            turns=(),
        )
        for one in forest(1, 8)
    ]
    assert_same(*both(policy(), to_batch(sequences), Grpo()))


@pytest.mark.parametrize("name", one_quick("gemma2", "llama", "mistral"))
def test_long_spans_are_cut_and_their_parts_looked_back_at(monkeypatch, name):
    monkeypatch.setattr(tree, "_SPAN", 3)
    monkeypatch.setattr(tree, "_OWN", 2)
    config, changes = FAMILIES[name]
    batch = to_batch(forest(7, 40))
    layout = tree.TreeLayout.of(tree.token_tree([batch[0][0].ids]), torch.device("cpu"), np.arange(1), 2)
    assert {block.shape[1] for block in layout.all.back} == {3}
    assert_same(*both(family(config, **changes), batch, Grpo()))


@pytest.mark.parametrize("packing", one_quick("tree", "padded"))
def test_chosen_tokens_without_logits_of_all_at_once(monkeypatch, packing):
    batch, objective = to_batch(forest(5, 12, temperatures=(1.0, 0.5))), Grpo()
    whole = get_gradient(policy(), batch, objective, packing=packing)
    monkeypatch.setattr("etude.learner.head._LOGITS", 400 * 7)
    assert_same(get_gradient(policy(), batch, objective, packing=packing), whole)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return found


@pytest.mark.parametrize("packing", one_quick("tree", "padded"))
@pytest.mark.parametrize("name", one_quick("dpo against the base", "grpo", "grpo with kl", "sft"))
def test_logits_are_never_there_for_all_positions(monkeypatch, name, packing):
    objective, of = OBJECTIVES[name], moved(fresh_policy())
    batch = to_batch(units_for(objective, forest(5, 60)))
    vocabulary = of.model.config.vocab_size
    most = max(value.numel() for value in of.trainable().values())
    monkeypatch.setattr("etude.learner.head._LOGITS", most)
    monkeypatch.setattr("etude.learner.head._HELD", most * 4)
    with Largest() as largest:
        get_gradient(of, batch, objective, packing=packing)
    trained = sum(weight != 0 for unit in batch for one in unit for weight in one.loss_weights)
    assert largest.numbers <= max(most, 60 * 60 * 48) < trained * vocabulary


CPU = torch.device("cpu")
FLEX_FAMILIES = {
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


def make_tree(count, seed=3):
    return token_tree([one.ids for one in forest(seed, count)])


def chain(length):
    return token_tree([list(range(length))])


def make_layout(tree, kernel, needed=None):
    needed = np.arange(len(tree)) if needed is None else needed
    return TreeLayout.of(tree, CPU, needed, most=16, kernel=kernel)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("tree", [chain(1), chain(128), chain(129), make_tree(90, 5)], ids=len)
def test_the_block_mask_is_the_one_that_torch_makes(tree, window):
    layout = make_layout(tree, "plain flex")
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


@pytest.mark.parametrize(("window", "softcap"), one_quick((4, 2.0), (None, None), (4, None), (None, 2.0)))
@pytest.mark.parametrize(("heads", "groups", "width"), one_quick((6, 2, 8), (3, 3, 24), (14, 2, 8)))
def test_it_is_the_attention_of_the_tiles(with_gradients, window, softcap, heads, groups, width):
    tree, draw = make_tree(40), torch.Generator().manual_seed(heads)
    layouts = [make_layout(tree, kernel) for kernel in ("blocks", "plain flex")]
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


@pytest.mark.parametrize("name", one_quick(*FLEX_FAMILIES))
def test_models_have_the_same_hidden_states_and_gradients(with_gradients, name):
    config, changes = FLEX_FAMILIES[name]
    of = family(config, **changes)
    assert tree_refusal(of.model, "plain flex") is None
    tree = make_tree(12, 7)
    needed = np.flatnonzero(np.arange(len(tree)) % 3)
    found = []
    for kernel in ("blocks", "plain flex"):
        hidden = tree_hidden(of.model, torch.from_numpy(tree.ids), make_layout(tree, kernel, needed))
        assert len(hidden) == len(needed)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        loss = (hidden * weights).sum() / len(needed)
        parameters = {name: value for name, value in of.trainable().items() if "lm_head" not in name}
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        zeros = [torch.zeros_like(one) for one in parameters.values()]
        filled = [zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True)]
        found.append((float(loss), dict(zip(parameters, filled, strict=True))))
    assert_same(found[1], found[0])


@pytest.mark.slow
def test_sizes_do_not_compile_it_anew():
    """One size, and then any, for each kind of mask. More than that would wear out torch's patience."""
    counter = CompileCounter()
    compiled = torch.compile(kernels._flex, backend=counter, fullgraph=True)
    compiled_for = {}
    for window in (None, 6, 7, 8):
        for length in (100, 200, 400, 700, 900):
            layout = make_layout(chain(length), "plain flex")
            size = len(layout.ends_N)
            query, key, value = (torch.randn(1, heads, size, 16) for heads in (4, 2, 2))
            with torch.no_grad():
                compiled(query, key, value, layout.block_mask(window), 0.25, None)
        compiled_for[window] = counter.frame_count
    assert compiled_for[None] <= 2
    assert compiled_for[6] <= 4
    assert compiled_for[8] == compiled_for[6]


def test_where_it_does_not_run_models_are_trained_padded_and_it_is_said_why(monkeypatch):
    of, batch = fresh_policy(), to_batch(forest(1, 12))
    monkeypatch.setattr("etude.learner.learner.tree_refusal", lambda model: tree_refusal(model, "flex"))
    learner = Learner(of, LearnerOptions(learning_rate=0.0))
    train(learner, batch, Grpo())
    assert "FlexAttention does not run here" in learner.note
    assert "NotImplementedError" in learner.note
    assert_same(get_gradient(of, batch, Grpo()), get_gradient(of, batch, Grpo(), packing="padded"))
