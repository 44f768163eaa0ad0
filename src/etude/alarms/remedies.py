"""Remedies: where a model does not learn, the line to write, and its effect on a real model.

Each entry is a heading of the page, which has the runs behind the figures.
"""

from __future__ import annotations

from collections.abc import Mapping

PAGE = "docs/when-it-does-not-learn.md"

_ADVICE: Mapping[str, str] = {
    "no-answer-is-right": (
        "show the model examples in the prompt (tried: 0 of 256 answers right, with three examples 104), or "
        "have it imitate some first: `finetuning.warm_up: {transcripts: agent:demonstrations, steps: 12}` "
        "(then 195)"
    ),
    "a-part-of-the-reward-is-farmed": (
        "`etude episodes` shows what earns it: give 1 for the whole task and 0 for less, and get the first "
        "right answers by examples or `warm_up` (tried: 232 of 256 answers right in place of 102)"
    ),
    "most-groups-are-flat": (
        "play other examples in their place: `trajectory_builders.NAME.replace_flat_groups: 48` (tried: 16 "
        "groups to learn from in epoch 4 in place of 8)"
    ),
    "nothing-is-left-to-learn": (
        "take harder examples, or a stricter reward (tried: 0.99 right before training with a reward for any "
        "number; for the right one 0.41 before and 0.89 after)"
    ),
    "all-attempts-are-alike": (
        "there is no better one to learn from: lower `trainer_adapters.NAME.learning_rate` to a third "
        "(tried: 0.43 right with 3e-3, 0.89 with 1e-3)"
    ),
    "the-reward-falls": (
        "lower `trainer_adapters.NAME.learning_rate` to a third (tried: 0.43 right with 3e-3, 0.89 with 1e-3)"
    ),
    "answers-are-cut-off": (
        "raise `llms.NAME.max_tokens` (tried: 0 of 256 answers right with 2 tokens, 104 with 8), or show the "
        "model short answers in the prompt"
    ),
    "learner-and-engine-differ": (
        "the gradient is of another policy than the one that acts: write `llms.NAME.dtype: float32` (tried: "
        "below 1e-7 then, and 0.72 right in place of 0.60, three seeds)"
    ),
}

REMEDIES: Mapping[str, str] = {name: f"{advice}; see {PAGE}#{name}" for name, advice in _ADVICE.items()}
"""The advice for each symptom, and the section of the page that says more."""
