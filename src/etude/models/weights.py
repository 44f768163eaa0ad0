"""Weights on disk and in the hand: digest, save, load. Always safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from etude.core.errors import StoreError
from etude.store.files import note_sum, require_as_written

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""The names that safetensors has for the types that are trained."""
_ALIGNMENT = 8


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that several processes may hold parts of; then all must call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this process holds of `like`, or all of it; on its device."""
    here = tensor.to(like.device)
    if not hasattr(like, "device_mesh") or hasattr(here, "device_mesh"):
        return here
    from torch.distributed.tensor import distribute_tensor

    placed: Any = like
    return distribute_tensor(here, placed.device_mesh, placed.placements, src_data_rank=None)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of the file that `save_tensors` would write; it tells whether weights changed."""
    hasher = hashlib.sha256()
    for part in file_parts(tensors):
        hasher.update(part)
    return hasher.hexdigest()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    """Write tensors to a safetensors file, and its digest beside it; gives the digest. Raises StoreError."""
    try:
        written = _write(tensors, path)
        note_sum(path, written)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}; free some space and run `etude resume`") from error
    return written


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    """The digest of the file, which is computed as it is written: nothing is read back."""
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for part in file_parts(tensors):
            hasher.update(part)
            file.write(part)
    return hasher.hexdigest()


def file_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, the same in whichever order the tensors are given.

    A header says where each lies, wide numbers first and then by name; their bytes come after it, without a
    copy of those that lie so on a CPU already. (safetensors' own writer does not give its bytes away.)
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = dict[str, Any](), 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(_ALIGNMENT, "little") + text
    for name in order:
        here = tensors[name].detach().to("cpu").contiguous()
        yield here.flatten().view(torch.uint8).numpy().data


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` has written.

    Raises DamagedError when it is not as it was written, StoreError when it cannot be read.
    """
    return load_with_digest(path)[0]


def load_with_digest(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The same, and the digest that `save_tensors` gave."""
    written = require_as_written(path)
    try:
        return load_file(path), written
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot read weights from {path}: {error}") from error


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
    if fused := [name for name in tensors if ".experts." in name]:
        raise StoreError(
            f"other engines take no LoRA weights on all experts of a layer together ({fused[0]}): name the "
            "layers of the attention as 'target_modules' of 'lora', or export the merged model"
        )
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
        plain = {name.replace(f"{_ADAPTER}.weight", ".weight"): value for name, value in tensors.items()}
        _write(plain, folder / "adapter_model.safetensors")
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error}; free some space") from error
