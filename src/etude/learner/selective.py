"""Logprobs and entropies at chosen tokens only: never the distributions of all positions at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_LOGITS = 1 << 24
"""Logits that are held at a time on a CPU, whose caches they outgrow soon."""
_LOGITS_ON_GPU = 1 << 27
"""Half a gigabyte in float32. Each chunk reads the head's weights again, and adds to their gradient."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [E, D] to logits [E, V]."""


def selective_logprobs(
    head: Head,
    hidden_ED: torch.Tensor,
    targets_E: torch.Tensor,
    temperatures_E: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Logprobs [E] of `targets_E` after `hidden_ED`.

    What does not fit into one chunk is computed again for the gradient, chunk by chunk.
    """
    return _by_chunks(_logprobs, head, (hidden_ED, targets_E, temperatures_E), vocabulary)


def logprobs_and_entropies(
    head: Head,
    hidden_ED: torch.Tensor,
    targets_E: torch.Tensor,
    temperatures_E: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Two rows [2, E]: those logprobs, and the entropies in nats of the distributions that they are of."""
    return _by_chunks(_with_entropies, head, (hidden_ED, targets_E, temperatures_E), vocabulary)


def _by_chunks(
    of: Callable[..., torch.Tensor], head: Head, fields: tuple[torch.Tensor, ...], vocabulary: int
) -> torch.Tensor:
    """`of(head, *fields)`, with as many logits at a time as may be held, joined along the last dimension."""
    held = _LOGITS_ON_GPU if fields[0].is_cuda else _LOGITS
    size = max(1, held // vocabulary)
    parts = list(zip(*(torch.split(field, size) for field in fields), strict=True))
    if len(parts) <= 1:
        return of(head, *fields)
    made = [checkpoint(of, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(made, dim=-1)


def _logprobs(
    head: Head, hidden_ED: torch.Tensor, targets_E: torch.Tensor, temperatures_E: torch.Tensor
) -> torch.Tensor:
    return -F.cross_entropy(_logits(head, hidden_ED, temperatures_E), targets_E, reduction="none")


def _with_entropies(
    head: Head, hidden_ED: torch.Tensor, targets_E: torch.Tensor, temperatures_E: torch.Tensor
) -> torch.Tensor:
    logprobs_EV = F.log_softmax(_logits(head, hidden_ED, temperatures_E), dim=-1)
    chosen_E = logprobs_EV.gather(1, targets_E[:, None]).squeeze(1)
    # A token that cannot be sampled adds nothing, and not zero times minus infinity.
    return torch.stack([chosen_E, -(logprobs_EV.exp() * logprobs_EV.clamp(min=-1e4)).sum(dim=-1)])


def _logits(head: Head, hidden_ED: torch.Tensor, temperatures_E: torch.Tensor) -> torch.Tensor:
    logits_EV = head(hidden_ED).float()
    return logits_EV / temperatures_E[:, None] if bool((temperatures_E != 1).any()) else logits_EV
