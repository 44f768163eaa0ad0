"""The facts about a model's architecture that others rely on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


def text_config(model: Any) -> Any:
    """The config of the language model, also where that is a part of a larger one."""
    return model.config.get_text_config()


def without_lora(model: Any) -> Any:
    """The model itself, whose linear layers may have LoRA weights."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layer_kinds(model: Any) -> list[str]:
    """For each layer its kind of attention: `full_attention`, `sliding_attention`, or something else."""
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


def logits_after(model: Any, ids_BT: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
    """Logits [B, K, V] of a plain forward pass after the tokens at `positions_K` (in rising order)."""
    if "logits_to_keep" in signature(without_lora(model).forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions_K).logits  # type: ignore[no-any-return]
    return model(input_ids=ids_BT, use_cache=False).logits[:, positions_K]  # type: ignore[no-any-return]


def undo_mask_patch() -> None:
    """Give transformers back its own function where openpipe-art has put one for earlier releases.

    `import art` replaces it for the whole process, in whatever imports it: the NeMo Agent Toolkit's ART
    plug-in does. With the transformers of today no model runs then.
    """
    patches = sys.modules.get("art.transformers.patches")
    original = getattr(patches, "_preprocess_mask_arguments", None)
    patched = getattr(patches, "_patched_preprocess_mask_arguments", None)
    if original is None or patched is None:
        return
    from transformers import masking_utils

    is_there = masking_utils._preprocess_mask_arguments is patched
    if is_there and _count_required(original) != _count_required(patched):
        masking_utils._preprocess_mask_arguments = original


def _count_required(function: Callable[..., Any]) -> int:
    return sum(kind.default is kind.empty for kind in signature(function).parameters.values())
