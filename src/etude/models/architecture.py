"""A model's architecture: its kinds of layers, LoRA weights on them, and whether Etude can use it."""

import threading
from inspect import signature
from typing import Any

import torch
from torch import nn

from etude.core.errors import RequestError, first_line

BUILDING = threading.RLock()
"""Held while a model is made or loaded, for which `transformers` replaces functions of the whole process."""

FULL, SLIDING = "full_attention", "sliding_attention"

_TRIAL = 12
"""Number of tokens in a trial sequence."""
_AHEAD = {torch.float32: 1e-4}
_AHEAD_IN_HALF = 1e-2
"""Largest difference, as a share of the largest logit, that rounding explains for a typical token."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}
_ROUNDING_IN_HALF = 0.15
"""The same for the worst of many tokens. In bfloat16, SmolLM2-135M's logits differ by 0.02 on a token tree,
and by 0.06 after 20 epochs of training; in float32 both differ by less than 1e-5."""
_LORA_KINDS = torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd, torch.nn.MultiheadAttention
"""Torch layers that peft can add LoRA weights to."""
_UNCALLED = "conv1d", "dt_proj", "out_proj"
"""State-space layers (Mamba; Gu and Dao, 2023) whose weights the kernels read without calling the layer."""


def model_class(config: Any) -> Any:
    """Return the `transformers` class that loads a language model with this config, multimodal ones included.

    Raises ValueError if the config belongs to another kind of model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"models of the type '{config.model_type}' do not continue a text token by token; take a causal "
        "language model, of a type that docs/models.md lists"
    )


def text_config(model: Any) -> Any:
    """Return the config of the language model, which may be part of a larger model's config."""
    return model.config.get_text_config()


def original_length(config: Any) -> int | None:
    """Return the context length before LongRoPE extended it, or None if it did not.

    Beyond this length, `transformers` rotates all tokens of a batch differently, also those in a cache and
    in shorter rows. Etude therefore never goes beyond it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None


def without_lora(model: Any) -> Any:
    """Return the base model if peft wraps the model, or else the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layer_kinds(model: Any) -> list[str]:
    """Return the kind of attention of each layer: `full_attention`, `sliding_attention`, or another name."""
    config = text_config(model)
    count = config.num_hidden_layers
    if getattr(config, "layer_types", None):
        return list(config.layer_types)[:count]
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "attention_chunk_size")):
        return ["other"] * count
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * count


def takes_key_value_slots(model: Any) -> bool:
    """Return whether the model's only state is cached keys and values, and it uses the mask it is given.

    Models that `transformers` has not moved to its attention interface build their own masks.
    """
    attends = bool(getattr(model, "_supports_attention_backend", False))
    return attends and set(layer_kinds(model)) <= {FULL, SLIDING}


def logits_after(model: Any, ids_BT: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
    """Return logits [B, K, V] of a plain forward pass after the tokens at `positions_K` (ascending)."""
    if "logits_to_keep" in signature(without_lora(model).forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions_K).logits  # type: ignore[no-any-return]
    return model(input_ids=ids_BT, use_cache=False).logits[:, positions_K]  # type: ignore[no-any-return]


def language_parts(model: Any) -> list[torch.nn.Module]:
    """Return the modules that read and write text: the whole model, unless it also has vision or audio."""
    plain = without_lora(model)
    if plain.config is text_config(plain):
        return [plain]
    return [plain.get_decoder(), plain.get_output_embeddings()]


def count_parameters(config: Any) -> int:
    """Count the parameters of a model with this config. Raises ValueError as `model_class` does."""
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    return sum(value.numel() for value in model.parameters())


@torch.no_grad()
def why_unusable(model: Any) -> str | None:
    """Return why a model cannot be sampled and trained token by token, as the end of a sentence, or None.

    The check runs the model: it must work on this machine, and later tokens in a sequence must not change
    the logits of earlier ones.
    """
    device, size = next(model.parameters()).device, text_config(model).vocab_size
    ids_2T = torch.arange(_TRIAL, device=device).mul(7).remainder(size).repeat(2, 1)
    ids_2T[1, _TRIAL // 2 :] = 0
    half_K = torch.arange(_TRIAL // 2, device=device)
    try:
        logits_2KV = logits_after(model, ids_2T, half_K).float()
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError, ImportError) as error:
        reason = str(error).strip().splitlines() or [""]
        return f"it does not run here ({type(error).__name__}: {reason[0]})"
    if logits_2KV.isnan().any():
        return "its weights contain NaN (values that are no numbers); get its files again"
    difference_K = (logits_2KV[0] - logits_2KV[1]).abs().amax(dim=-1) / logits_2KV.abs().amax()
    # The median, because rounding may route a token to other experts.
    if float(difference_K.median()) > _AHEAD.get(next(model.parameters()).dtype, _AHEAD_IN_HALF):
        return (
            "it looks ahead: later tokens change what it says of earlier ones, so it cannot be sampled from"
        )
    return None


def logit_error(logits: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return how far `logits` are off, as a share of the largest logit; None if rounding explains it.

    `dtype` is the model's type; the logits may have another.
    """
    difference = float((plain.float() - logits.float()).abs().max() / plain.abs().max())
    within = difference <= _ROUNDING.get(dtype, _ROUNDING_IN_HALF)
    return None if within else f"{difference:.1g}"  # NaN is not within either.


def with_lora(model: Any, config: Any) -> Any:
    """Add LoRA weights to linear layers of a model, as peft's `LoraConfig` says.

    Raises RequestError if a name fits no layer that can have LoRA weights.
    """
    from peft import get_peft_model

    layers, able = dict(model.named_modules()), _lora_layers(model)
    kinds = [(path, layer) for path, layer in layers.items() if isinstance(layer, _LORA_KINDS)]
    config.exclude_modules = [path for path, _ in kinds if path not in able] or None
    names, why = config.target_modules, None
    try:
        model = get_peft_model(model, config)
    except ValueError as error:
        why = first_line(error)
    # peft has already removed the names of experts that transformers stores as one tensor.
    for name in [] if isinstance(names, str) else sorted(config.target_modules):
        if not any(path == name or path.endswith(f".{name}") for path in able):
            known = ", ".join(sorted({path.rpartition(".")[2] for path in able}))
            why = f"none can be put on '{name}'; 'target_modules' can name {known}"
    if why:
        raise RequestError(f"LoRA weights do not fit this model: {why}")
    return model


def _lora_layers(model: Any) -> set[str]:
    """Return the names of the layers that can have LoRA weights: they get text, and multiply by a matrix.

    State-space kernels read the weights of some layers without calling them. Routers return more than a
    product. Vision and audio layers get no text. The head and the embeddings often share a weight.
    """
    from transformers.pytorch_utils import Conv1D

    within = {id(module) for part in language_parts(model) for module in part.modules()}
    within.discard(id(without_lora(model).get_output_embeddings()))
    uncalled = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
        for part in _UNCALLED
    }
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in within and name not in uncalled
        if "Router" not in type(module).__name__
    }
