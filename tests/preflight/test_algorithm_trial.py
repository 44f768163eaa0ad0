"""Algorithms of a user's own, tried before a run: what they raise and return is said by its name."""

from __future__ import annotations

import pytest
import torch

import etude
from etude.algorithms.grpo import ReinforcePP, Rloo
from etude.algorithms.malt import Malt
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.preflight.own_code import is_own, try_algorithm


def own(base=etude.Grpo, **methods):
    """An algorithm that overrides methods of another one."""
    return type("Own", (base,), {"__module__": __name__, "__qualname__": "Own", **methods}, name="")()


GOOD = {
    "one of ours with another name": own(),
    "tensors for advantages": own(advantages=lambda self, group: torch.ones(len(group), 1)),
    "another loss": own(loss=lambda self, logprobs_BT, batch: (logprobs_BT.sum(), {"a": torch.ones(())})),
    "pairs": own(etude.Dpo, pair_loss=lambda self, margin_P: torch.relu(1 - margin_P)),
    "no data without plays": own(Malt),
    "imitation": own(etude.ExpertIteration),
    "over the whole batch": own(ReinforcePP),
    "rloo": own(Rloo),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("examples", [[], [Example("a", {"question": "?"}), Example("b")]])
def test_what_works_is_not_complained_about(name, examples):
    assert is_own(GOOD[name])
    try_algorithm(GOOD[name], examples)


def raising(self, *arguments):
    raise ValueError("boom")


def undefined(self, group, tally):
    return missing  # noqa: F821


HERE = r"test_algorithm_trial\.py:\d+: "


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"samples": raising}, rf"Own\.raising raised .*{HERE}ValueError: boom"),
        ({"samples": undefined}, rf"Own\.undefined raised .*{HERE}NameError"),
        ({"samples": lambda self, group, tally: None}, r"<lambda> returned None, and `Sequence\[Sample"),
        (
            {"samples": lambda self, group, tally: [1]},
            r"returned a list \(\[1\]\), and `Sequence\[Sample \| Pair\]` is",
        ),
        ({"groups": lambda self, *given: None}, r"<lambda> returned None, and `list\[UnitGroup\]`"),
        ({"compare": raising}, rf"Own\.raising raised .*{HERE}ValueError: boom"),
        ({"compare": lambda self, rewards: [1.0]}, r"what it returned cannot be used \(it has compare\)"),
        (
            {"advantages": lambda self, group: [0.5 for _ in group]},
            r"<lambda> returned a list \(\[0\.5, ",
        ),
        ({"advantages": lambda self, group: [[0.5]]}, "it gave 1 lists for 4 samples"),
        ({"advantages": lambda self, group: [[0.5, 1.0]] * 4}, r"with 1 turns got \[0\.5, 1\.0\]"),
        ({"advantages": lambda self, group: [[float("nan")]] * 4}, r"with 1 turns got \[nan\]"),
        (
            {"advantages": lambda self, group: [["high"]] * 4},
            r"<lambda> returned a list \(\[\['high'",
        ),
        ({"normalised": lambda self, units: [1.0]}, r"<lambda> returned a list \(\[1\.0\]\)"),
        ({"normalised": lambda self, units: [[1.0]]}, r"Own\.normalised returned a list"),
        ({"loss": raising}, rf"Own\.raising raised .*{HERE}ValueError: boom"),
        ({"loss": lambda self, logprobs, batch: logprobs.sum()}, "<lambda> returned a Tensor"),
        ({"loss": lambda self, logprobs, batch: None}, r"<lambda> returned None, and `tuple\[Tensor"),
        ({"loss": lambda self, logprobs, batch: (logprobs, {})}, r"a Tensor of shape \(8, \d\)"),
        ({"loss": lambda self, logprobs, batch: (1.0, {})}, r"and `tuple\[Tensor, dict\[str, float\]\]` is"),
        ({"loss": lambda self, logprobs, batch: (batch.weights_BT.sum(), {})}, "it has no gradient"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum().log(), {})}, "is not finite: it is nan"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum(), {"a": "b"})}, "a str; expected: .* 'a'"),
        ({"loss": lambda self, logprobs, batch: (logprobs * batch.entropy_BT, {})}, "raised .*TypeError"),
    ],
)
def test_what_is_wrong_is_said_with_the_method_or_the_line(methods, message):
    with pytest.raises(RequestError, match=message):
        try_algorithm(own(**methods), [])
