"""What kind of model it is: the facts about an architecture that others rely on."""

from __future__ import annotations

import inspect
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


def text_config(model: Any) -> Any:
    """The config of the language model, also where that is a part of a larger one."""
    return model.config.get_text_config()


def layer_kinds(model: Any) -> list[str]:
    """For each layer what it looks back with: `full_attention`, `sliding_attention`, or something else."""
    config = text_config(model)
    count = config.num_hidden_layers
    if getattr(config, "layer_types", None):
        return list(config.layer_types)[:count]
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "attention_chunk_size")):
        return ["other"] * count
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * count


def takes_key_value_slots(model: Any) -> bool:
    """Whether the model attends to nothing but cached keys and values, under the mask that it is given.

    Models that `transformers` has not moved to its attention interface make masks of their own.
    """
    attends = bool(getattr(model, "_supports_attention_backend", False))
    return attends and set(layer_kinds(model)) <= {FULL, SLIDING}


def max_context(model: Any) -> int:
    """Tokens that prompt and completion may have together; a guess where the config has no limit."""
    return int(getattr(text_config(model), "max_position_embeddings", None) or 4096)


def logits_after(model: Any, ids_BT: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
    """Logits [B, K, V] of a plain forward pass after the tokens at `positions_K` (in rising order)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        kept = model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions_K).logits
    else:
        kept = model(input_ids=ids_BT, use_cache=False).logits[:, positions_K]
    return kept  # type: ignore[no-any-return]
