"""Token trees through a model: the gradients of padding, for every family."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.learner import tree
from etude.learner.passes import PackedStep, trained_units, tree_refusal
from tests.learner.gradients import assert_same, forest, get_gradient, to_batch
from tests.models.tiny_models import change_weights, family, fresh_policy, policy
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
    "dpo against the base": Dpo(beta=0.5, reference="base"),
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


def move_weights(of):
    """A policy whose weights are no longer its base's."""
    of.keep_base()
    change_weights(of, lambda one: one.mul_(1.02))
    return of


QUICK = {"gspo", "cispo", "grpo with kl", "dpo against the base", "sft"}


@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *one_quick("grpo", *sorted(OBJECTIVES.keys() - QUICK - {"grpo"}))]
)
def test_every_objective_has_the_gradient_of_padding(name):
    objective = OBJECTIVES[name]
    of = move_weights(fresh_policy())
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
def test_how_a_tree_is_cut_changes_nothing(monkeypatch, name):
    objective = OBJECTIVES[name]
    batch = to_batch(units_for(objective, forest(3, 16)))
    whole, padded = both(policy(), batch, objective)
    assert_same(whole, padded)
    for token_budget, queries in ((1, 64), (30, 2), (60, 5)):
        monkeypatch.setattr(tree, "_QUERIES", queries)
        cut = get_gradient(policy(), batch, objective, packing="tree", token_budget=token_budget)
        assert_same(cut, padded)


@pytest.mark.parametrize("packing", one_quick("tree", "padded"))
def test_chosen_tokens_without_logits_of_all_at_once(monkeypatch, packing):
    batch, objective = to_batch(forest(5, 12, temperatures=(1.0, 0.5))), Grpo()
    whole = get_gradient(policy(), batch, objective, packing=packing)
    monkeypatch.setattr("etude.learner.head._HELD", 400 * 7 * 4)
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
    objective, of = OBJECTIVES[name], move_weights(fresh_policy())
    batch = to_batch(units_for(objective, forest(5, 60)))
    vocabulary = of.model.config.vocab_size
    most = max(value.numel() for value in of.trainable().values())
    monkeypatch.setattr("etude.learner.head._HELD", most * 4)
    with Largest() as largest:
        get_gradient(of, batch, objective, packing=packing)
    trained = sum(weight != 0 for unit in batch for one in unit for weight in one.loss_weights)
    assert largest.numbers <= max(most, 60 * 60 * 48) < trained * vocabulary
