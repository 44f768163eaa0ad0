"""The head of a language model apart from its body: logits after chosen tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.models.architecture import logits_after, text_config, without_lora
from etude.models.distribution import Shape, shaped

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_ROUGHLY = 5e-2
"""By how much of the largest logit others may be off; half precision rounds as much."""

_LOGITS = 1 << 24
"""Logits that are held at a time on a CPU, whose caches they outgrow soon."""
_LOGITS_ON_GPU = 1 << 27
"""Half a gigabyte in float32. Each chunk reads the head's weights again, and adds to their gradient."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [E, D] to logits [E, V]."""

Shapes: TypeAlias = Sequence[Shape | None]
"""How the distributions that tokens were drawn from differ from the model's own."""


def last_hidden(model: Any, ids_BT: Tensor) -> Tensor:
    """Last hidden states [B, T, D] of a plain forward pass."""
    hidden_BTD: Tensor = without_lora(model).base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden_BTD


def head_logits(model: Any, hidden_ED: Tensor) -> Tensor:
    """Logits [E, V] of last hidden states."""
    logits: Tensor = without_lora(model).get_output_embeddings()(hidden_ED)
    config = text_config(model)
    # The names of Cohere, Granite and Gemma; what others do is found out by trying.
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def off_by(model: Any, logits: Tensor, plain: Tensor) -> str | None:
    """By how much of the largest logit `logits` are off, if that is more than rounding; None if not."""
    difference = float((plain.float() - logits.float()).abs().max() / plain.abs().max())
    within = difference <= _TOLERANCES.get(next(model.parameters()).dtype, _ROUGHLY)
    return None if within else f"{difference:.1g}"  # Nor is not-a-number within.


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Whether `head_logits` of the last hidden states are the model's logits. It is seen by trying."""
    device, size = next(model.parameters()).device, text_config(model).vocab_size
    ids_1T = (torch.arange(6, device=device) * 7 % size)[None]
    try:
        logits = head_logits(model, last_hidden(model, ids_1T)[0])
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError):
        return False
    plain = logits_after(model, ids_1T, torch.arange(6, device=device))[0]
    return logits.shape == plain.shape and off_by(model, logits, plain) is None


def selective_logprobs(
    head: Head,
    hidden_ED: Tensor,
    targets_E: Tensor,
    shapes_E: Shapes,
    vocabulary: int,
    *,
    entropies: bool = False,
) -> Tensor:
    """Logprobs [E] of `targets_E` after `hidden_ED`, under the distributions that `shapes_E` are of.

    With `entropies` two rows [2, E]: those logprobs, and the entropies in nats of the distributions that they
    are of. There are only as many logits at a time as may be held: what does not fit into one chunk is
    computed again for the gradient, chunk by chunk.
    """
    size = logits_at_once(vocabulary, on_gpu=hidden_ED.is_cuda)
    starts = range(0, len(shapes_E), size)
    if len(starts) <= 1:
        return _chosen(head, hidden_ED, targets_E, shapes_E, entropies)
    shapes = [shapes_E[start : start + size] for start in starts]
    parts = list(zip(torch.split(hidden_ED, size), torch.split(targets_E, size), shapes, strict=True))
    made = [
        checkpoint(_chosen, head, *part, entropies, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.cat(made, dim=-1)


def logits_at_once(vocabulary: int, on_gpu: bool) -> int:
    """After how many tokens there are logits at a time."""
    return max(1, (_LOGITS_ON_GPU if on_gpu else _LOGITS) // vocabulary)


def _chosen(head: Head, hidden_ED: Tensor, targets_E: Tensor, shapes_E: Shapes, entropies: bool) -> Tensor:
    logits_EV = shaped(head(hidden_ED), shapes_E, targets_E)
    if not entropies:
        return -F.cross_entropy(logits_EV, targets_E, reduction="none")
    logprobs_EV = F.log_softmax(logits_EV, dim=-1)
    chosen_E = logprobs_EV.gather(1, targets_E[:, None]).squeeze(1)
    # A token that cannot be sampled adds nothing, and not zero times minus infinity.
    return torch.stack([chosen_E, -(logprobs_EV.exp() * logprobs_EV.clamp(min=-1e4)).sum(dim=-1)])
