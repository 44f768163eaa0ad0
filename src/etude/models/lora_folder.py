"""LoRA weights as a folder that peft and vLLM load, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from etude.core.errors import StoreError
from etude.models.weights import save_tensors

_ADAPTER = ".default"
"""The name that peft gives to the first LoRA weights of a model."""


def write_lora_folder(
    tensors: Mapping[str, torch.Tensor], *, r: int, alpha: float, base: str, folder: Path
) -> None:
    """Write LoRA tensors, named as `Policy.trainable` names them, as `adapter_model.safetensors`.

    Raises StoreError when the tensors are no LoRA weights or the folder cannot be written.
    """
    odd = [name for name in tensors if f"{_ADAPTER}.weight" not in name]
    if odd or not tensors:
        raise StoreError(f"these are no LoRA weights: {odd[0] if odd else 'there are none'}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error.strerror}") from error
    plain = {name.replace(f"{_ADAPTER}.weight", ".weight"): value for name, value in tensors.items()}
    save_tensors(plain, folder / "adapter_model.safetensors")
