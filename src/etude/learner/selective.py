"""Logprobs of chosen tokens only: never the distributions of all positions at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_LOGITS = 1 << 24
"""Logits that are held at a time."""

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
    size = max(1, _LOGITS // vocabulary)
    fields = (hidden_ED, targets_E, temperatures_E)
    parts = list(zip(*(torch.split(field, size) for field in fields), strict=True))
    if len(parts) <= 1:
        return _logprobs(head, hidden_ED, targets_E, temperatures_E)
    return torch.cat(
        [checkpoint(_logprobs, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    )


def _logprobs(
    head: Head, hidden_ED: torch.Tensor, targets_E: torch.Tensor, temperatures_E: torch.Tensor
) -> torch.Tensor:
    logits_EV = head(hidden_ED).float()
    if bool((temperatures_E != 1).any()):
        logits_EV = logits_EV / temperatures_E[:, None]
    return -F.cross_entropy(logits_EV, targets_E, reduction="none")
