"""Whether the steps of a job fit into the memory that is free where it is trained, before they are taken."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from etude.core.errors import TrainingError
from etude.learner.learner import Learner
from etude.learner.memory import ModelNumbers, fits
from etude.learner.objective import Unit
from etude.models.memory import available_memory, shown_bytes


class TooLittleMemory(TrainingError):
    """A step would take more memory than is free."""


def require_room(learner: Learner, units: Sequence[Unit]) -> None:
    """Raise TooLittleMemory where a step on `units` takes more memory than is free.

    Where it fits with gradient checkpointing, and the options leave that open, there is some from then on.
    It is asked by the processes of a team together; those on one machine or GPU need it together. What is no
    larger than a step that was allowed before is not looked at.
    """
    for by_length in (True, False):  # To find out what sequences share takes as long as a small step.
        tokens, choices, is_lean = learner.largest_pass(units, by_length=by_length)
        if tokens <= learner.allowed_tokens:
            return
        why_not = _why_not(learner, tokens, choices, is_lean)
        if why_not is not None and not by_length and learner.spare_memory():
            why_not = _why_not(learner, tokens, choices, is_lean)
        if why_not is None:
            learner.allowed_tokens = tokens
            return
    raise TooLittleMemory(why_not)


def _why_not(learner: Learner, tokens: int, choices: int, is_lean: bool) -> str | None:
    """Why a pass takes more memory than is free, if it does: on any machine of the team."""
    policy, team = learner.policy, learner.team
    device = next(policy.model.parameters()).device
    needed = ModelNumbers.of(policy).training(
        tokens,
        choices,
        is_lean,
        on_gpu=device.type == "cuda",
        checkpointed=learner.computes_twice,
        parts=team.size if team.shards else 1,
    )
    own, free = needed.to_come(has_moments=learner.optimiser.has_moments), available_memory(str(device))
    place = f"{platform.node()}/{device}"
    together = int(team.sum({place: own})[place])
    short = free is not None and not fits(together, free)
    if not team.any(short):
        return None
    if free is None or not short:
        return "another process of the job has too little memory"
    twice = "" if learner.computes_twice else "set gradient_checkpointing, "
    return (
        f"training on {tokens} tokens at a time takes about {shown_bytes(together)} of memory beside the "
        f"weights ({needed.shown('gradients', 'moments', 'activations', 'overhead')}), and "
        f"{shown_bytes(free)} are free on {device} of {platform.node()}; lower token_budget or "
        f"batch_size, {twice}train LoRA weights, or free some memory"
    )
