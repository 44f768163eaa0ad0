"""LoRA weights: adding them to a model and merging them into it."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import nn

from etude.core.errors import RequestError, first_line
from etude.models.architecture import base_layer, lora_exclusions, text_config, without_lora

_TIED = "Model has `tie_word_embeddings=True`"
"""The start of a peft warning about merging LoRA weights into a shared weight, which `merge_lora` avoids."""


def with_lora(model: Any, config: Any) -> Any:
    """Add LoRA weights to a model, as peft's `LoraConfig` says.

    Raises RequestError if a name fits no layer that can have LoRA weights, or if layers share their weight.
    """
    from peft import get_peft_model

    layers, is_named = dict(model.named_modules()), not isinstance(config.target_modules, str)
    excluded, why = set(lora_exclusions(model)), None
    config.exclude_modules = excluded or None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_TIED)
            model = get_peft_model(model, config)
    except ValueError as error:
        why = first_line(error)
    # peft has already removed the names of experts that transformers stores as one tensor.
    names = sorted(config.target_modules) if is_named else []
    if why := _why_not(layers, names, excluded) or why or _why_shared(model):
        raise RequestError(f"LoRA weights do not fit this model: {why}")
    return model


def merge_lora(model: Any) -> Any:
    """Return a copy of a model, with its LoRA weights merged into its own weights.

    If head and embedding share a weight and one of them has LoRA weights, the copy gets a separate head.
    """
    model = copy.deepcopy(model)
    plain = without_lora(model)
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    is_shared = head is not None and head.weight is embedding.weight
    if is_shared and any(hasattr(layer, "base_layer") for layer in (head, embedding)):
        own = base_layer(head)
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
        plain.config.tie_word_embeddings = text_config(plain).tie_word_embeddings = False
    return model.merge_and_unload()


def _why_not(layers: Mapping[str, Any], names: Sequence[str], excluded: Set[str]) -> str | None:
    """Return why layers with these names, or name endings, cannot have LoRA weights; None if they can."""
    from transformers.pytorch_utils import Conv1D

    able = {
        path
        for path, layer in layers.items()
        if isinstance(layer, nn.Linear | nn.Embedding | Conv1D) and path not in excluded
    }
    known = ", ".join(sorted({path.rpartition(".")[2] for path in able}))
    for name in names:
        meant = [path for path in layers if path == name or path.endswith(f".{name}")]
        if not meant:
            return f"it has no layer that is called '{name}'; 'target_modules' can name {known}"
        odd = [path for path in meant if path not in able and path not in excluded]
        if odd or not able.intersection(meant):
            kind = type(layers[(odd or meant)[0]]).__name__
            return f"none can be put on '{name}' ({kind}); 'target_modules' can name {known}"
    return None


def _why_shared(model: Any) -> str | None:
    """Return why a model's LoRA weights cannot be merged, or None if they can.

    Layers that share a weight are the reason, except for head and embedding: `merge_lora` separates these.
    """
    plain, paths = without_lora(model), defaultdict(list)
    ends = {id(base_layer(end)) for end in (plain.get_output_embeddings(), plain.get_input_embeddings())}
    for path, layer in plain.named_modules(remove_duplicate=False):
        if id(layer) not in ends:
            for weight in layer.parameters(recurse=False):
                paths[id(weight)].append(path)
    for shared in paths.values():
        if len(shared) > 1 and any(path.endswith(".base_layer") for path in shared):
            layers = " and ".join(path.removesuffix(".base_layer") for path in shared)
            return f"{layers} have one weight; leave them out of 'target_modules'"
    return None


def gguf_options() -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a GGUF file as a dequantised model."""
    import transformers

    # Versions of transformers without this class always dequantise.
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}
