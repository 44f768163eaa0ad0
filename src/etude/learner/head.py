"""The head of a language model apart from its body: logits after chosen tokens only."""

from __future__ import annotations

from typing import Any

import torch

from etude.models.architecture import logits_after, text_config

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_ROUGHLY = 5e-2
"""By how much of the largest logit others may be off; half precision rounds as much."""


def plain_model(model: Any) -> Any:
    """The model that LoRA weights may be on."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def last_hidden(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Last hidden states [B, T, D] of a plain forward pass."""
    hidden_BTD: torch.Tensor = (
        plain_model(model).base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    )
    return hidden_BTD


def head_logits(model: Any, hidden_ED: torch.Tensor) -> torch.Tensor:
    """Logits [E, V] of last hidden states."""
    logits: torch.Tensor = plain_model(model).get_output_embeddings()(hidden_ED)
    config = text_config(model)
    # The names of Cohere, Granite and Gemma; what others do is found out by trying.
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def off_by(model: Any, found: torch.Tensor, plain: torch.Tensor) -> str | None:
    """By how much of the largest logit `found` is off, if that is more than rounding; None if not."""
    difference = float((plain.float() - found.float()).abs().max() / plain.abs().max())
    within = difference <= _TOLERANCES.get(next(model.parameters()).dtype, _ROUGHLY)
    return None if within else f"{difference:.1g}"  # Nor is not-a-number within.


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Whether `head_logits` of the last hidden states are the model's logits. It is seen by trying."""
    device, size = next(model.parameters()).device, text_config(model).vocab_size
    ids_1T = (torch.arange(6, device=device) * 7 % size)[None]
    try:
        found = head_logits(model, last_hidden(model, ids_1T)[0])
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError):
        return False
    plain = logits_after(model, ids_1T, torch.arange(6, device=device))[0]
    return found.shape == plain.shape and off_by(model, found, plain) is None
