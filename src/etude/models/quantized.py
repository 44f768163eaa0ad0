"""Base weights of four or eight bits each, under LoRA weights that are trained.

Those of four bits (QLoRA; Dettmers et al., 2023) are NF4 numbers of bitsandbytes, whose scales are quantised
once more: half a byte and a bit for a weight of a linear layer. Products are computed in the model's own
type; norms, embeddings and head are float32. Those of eight bits are `EightBitWeights`, on any device.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch

from etude.core.errors import MissingExtraError, RequestError
from etude.models.eight_bits import has_eight_bits

Quantization: TypeAlias = Literal["4bit", "8bit"]
FOUR_BITS: Quantization = "4bit"
EIGHT_BITS: Quantization = "8bit"


def require_quantization(quantization: Quantization, device: torch.device) -> None:
    """Raise RequestError where there are no such weights, and MissingExtraError without bitsandbytes."""
    if quantization == EIGHT_BITS:
        return
    if device.type != "cuda":
        raise RequestError(
            f"quantization '{FOUR_BITS}' needs a CUDA device, and the model is to run on '{device.type}': "
            f"take '{EIGHT_BITS}', leave 'quantization' out, or take a machine with an NVIDIA GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise MissingExtraError(f"quantization '{FOUR_BITS}' (bitsandbytes not installed)", "bnb")


def four_bits(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise a model as it is loaded, onto a device."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def dequantised() -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a plain model of a GGUF file."""
    import transformers

    # Before there was that class, it was always so.
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def prepared(model: Any) -> Any:
    """A quantised model that is ready for LoRA weights: frozen, with float32 where it has no four bits."""
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def is_quantized(model: Any) -> bool:
    """Whether the weights of a model are held in fewer bits than they can be trained in."""
    return bool(getattr(model, "is_quantized", False)) or has_eight_bits(model)
