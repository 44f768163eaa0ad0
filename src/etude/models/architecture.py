"""The facts about a model's architecture that others rely on."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"

_TRIAL = 12
"""Tokens that a model is tried on."""
_AHEAD = {torch.float32: 1e-4}
_AHEAD_IN_HALF = 1e-2
"""Share of the largest logit that rounding does not make up, for a token."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}
_ROUNDING_IN_HALF = 0.15
"""The same for the worst of many tokens. In bfloat16 SmolLM2-135M's are off by 0.02 on a token tree, and by
0.06 once it was trained for 20 epochs; in float32 both by less than 1e-5."""
_LORA_KINDS = torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd, torch.nn.MultiheadAttention
"""Layers of torch that peft puts LoRA weights on."""
_UNCALLED = "conv1d", "dt_proj", "out_proj"
"""Layers of a state space (Mamba; Gu and Dao, 2023) whose weights its kernels take without calling them."""


def model_class(config: Any) -> Any:
    """The class of `transformers` that loads a language model, also one that can see.

    Raises ValueError for a config of other models.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"models of the type '{config.model_type}' do not continue a text token by token; take a causal "
        "language model, of a type that docs/architectures.md lists"
    )


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


def language_parts(model: Any) -> list[torch.nn.Module]:
    """The modules that read and write text: all of a model, unless it sees or hears as well."""
    plain = without_lora(model)
    if plain.config is text_config(plain):
        return [plain]
    return [plain.get_decoder(), plain.get_output_embeddings()]


def lora_exclusions(model: Any) -> list[str]:
    """Names of layers that LoRA weights cannot go on, or would have no effect on.

    Kernels of state spaces take the weights of some without calling them, of convolutions too. Routers give
    more than a product, and some embeddings more than a row. Layers outside the language model see no text.
    """
    within = {id(module) for part in language_parts(model) for module in part.modules()}
    excluded = []
    for name, module in model.named_modules():
        if isinstance(module, _LORA_KINDS) and (id(module) not in within or _is_more(module)):
            excluded.append(name)
        if hasattr(module, "A_log") and hasattr(module, "D"):
            excluded += [f"{name}.{part}" for part in _UNCALLED if hasattr(module, part)]
    return excluded


def _is_more(module: Any) -> bool:
    """Whether a layer is more than its matrix, of which LoRA weights change nothing else."""
    if isinstance(module, torch.nn.Embedding):
        # What peft knows of others is that their rows are scaled.
        is_scaled = hasattr(module, "embed_scale")
        return not is_scaled and type(module).forward is not torch.nn.Embedding.forward
    return not isinstance(module, torch.nn.Linear) or "Router" in type(module).__name__


def parameters_of(config: Any) -> int:
    """How many parameters a model of this config has. Raises ValueError as `model_class` does."""
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    return sum(value.numel() for value in model.parameters())


@torch.no_grad()
def why_unusable(model: Any) -> str | None:
    """Why a model cannot be sampled and trained token by token, as the end of a sentence; None if it can.

    It is seen by trying: the model must run on this machine, and what comes later in a sequence must not
    change the logits before it.
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
    difference_K = (logits_2KV[0] - logits_2KV[1]).abs().amax(dim=-1) / logits_2KV.abs().amax()
    # The median: rounding may route a token to other experts.
    if float(difference_K.median()) > _AHEAD.get(next(model.parameters()).dtype, _AHEAD_IN_HALF):
        return (
            "it looks ahead: later tokens change what it says of earlier ones, so it cannot be sampled from"
        )
    return None


def off_by(logits: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> str | None:
    """By how much of the largest logit `logits` are off, if that is more than rounding; None if not.

    `dtype` is that of the model, whose logits may be in another.
    """
    difference = float((plain.float() - logits.float()).abs().max() / plain.abs().max())
    within = difference <= _ROUNDING.get(dtype, _ROUNDING_IN_HALF)
    return None if within else f"{difference:.1g}"  # Nor is not-a-number within.


def base_layer(layer: Any) -> Any:
    """A layer without its LoRA weights."""
    return getattr(layer, "base_layer", layer)
