"""Weights on disk and in memory: hash, save, load. Always safetensors, never pickle.

A model's files must match its config: no weight may be missing, and none may be unused.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from etude.config.finetuning import LoraOptions
from etude.core.errors import EtudeError, RequestError, StoreError, first_line
from etude.models.architecture import BUILDING, model_class
from etude.models.source import local_path, pretrained_arguments
from etude.store.files import note_sum, require_as_written


@contextmanager
def loading(source: str | Path) -> Iterator[tuple[str, dict[str, str], Any]]:
    """Load a model inside the block. Yields its folder or name, its GGUF file's arguments and its config.

    Raises RequestError if there is no such model, or it cannot be loaded.
    """
    from transformers import AutoConfig

    name, file = pretrained_arguments(source)
    try:
        with BUILDING:
            yield name, file, AutoConfig.from_pretrained(name, trust_remote_code=False, **file)
    except EtudeError:
        raise
    except Exception as error:  # transformers raises almost any for an odd config or file.
        reason = first_line(error)
        if file and _is_damaged(Path(name, file["gguf_file"])):
            reason += "; the file is incomplete or damaged: download it again"
        elif "trust_remote_code" in str(error):
            reason = "it needs code of its own, which Etude does not run; choose one that transformers knows"
        elif "backend tokenizer" in reason:
            reason = "no tokenizer can be made of its files; get its tokenizer.json too"
        elif type(error) is not ValueError and not isinstance(error, OSError | ImportError | RuntimeError):
            # The error is about a value and does not mention files.
            odd = reason if " " in reason else f"{type(error).__name__}: {reason}"
            reason = f"something in its files is not as transformers expects ({odd}); get them again"
        what = f"cannot load the model '{source}'"
        if local_path(source) is None:
            what = f"there is no folder '{source}', and from the Hugging Face hub it cannot be loaded"
        raise RequestError(f"{what}: {reason}") from error


def _is_damaged(path: Path) -> bool:
    """Return whether the `gguf` package cannot read a GGUF file to its end."""
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except Exception:  # noqa: BLE001  any error of numpy and struct
        return True
    return False


_NoNumbersError: type[Exception] = vars(torch.serialization)["pickle"].UnpicklingError
"""The error of `torch.load` for a file with more than tensors; its text advises to trust the file."""

_SHOWN = 5


def load_model(config: Any, location: str, **options: Any) -> Any:
    """Load the model of a config with weights from a folder or the hub; `options` go to `from_pretrained`.

    A GGUF file is dequantised. Raises ValueError that names weights that are missing, unused, of another
    shape, or different though the config ties them. Raises other errors as `transformers` does.
    """
    import transformers

    silence_transformers()
    kind = getattr(transformers, "GgufConfig", None)  # Older ones always dequantise.
    if "gguf_file" in options and kind is not None:
        options["quantization_config"] = kind(dequantize=True)
    try:
        model, found = model_class(config).from_pretrained(
            location, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except _NoNumbersError as error:
        raise ValueError(
            "a file of its weights is damaged, or holds more than numbers; get the files again, as "
            "safetensors where there are any"
        ) from error
    shapes = [
        f"{name} ({[*there]}, and {[*wanted]} by the config)"
        for name, there, wanted in found["mismatched_keys"]
    ]
    # Other programs, such as vLLM, take one of the two for both. On the device `meta` there are no values.
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    twice = tied.keys() - model.all_tied_weights_keys.keys()
    faults = [
        *_fault("have own values, though their config has `tie_word_embeddings: true`, for", twice),
        *_fault("have no", found["missing_keys"]),
        *_fault("have another shape of", shapes),
        *_fault("have weights that the model has no use for:", found["unexpected_keys"]),
    ]
    if faults:
        raise ValueError(f"its files {'; they '.join(faults)}. Get the model again, or correct its config")
    return model


def load_outline(config: Any, location: str, gguf_file: str | None = None) -> Any:
    """Load the model without its values, on the device `meta`, and check its local files against its config.

    GGUF files and quantised models are checked only when they are loaded. Raises errors as `load_model` does.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantized = getattr(config, "quantization_config", None)
    if gguf_file is None and quantized and AutoHfQuantizer.supports_quant_method(quantized):
        # Raises the errors of a missing package or GPU.
        AutoHfQuantizer.from_config(quantized).validate_environment(device_map=None, weights_only=True)
    elif gguf_file is None and not quantized:
        try:
            model = load_model(config, location, device_map="meta", local_files_only=True)
            model.tie_weights()
            return model
        except OSError:
            if local_path(location) is not None:
                raise
    with torch.device("meta"):
        return model_class(config).from_config(config)


def _fault(what: str, names: Iterable[str]) -> list[str]:
    """Return a clause that names the weights at fault, or nothing if there are none."""
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return [f"{what} {', '.join(listed[:_SHOWN])}{more}"] if listed else []


def silence_transformers() -> None:
    """Turn off transformers' progress bars, and send its log lines to the root logger only."""
    from transformers.utils import logging as own

    own.disable_progress_bar()
    # With its own handler, each line would appear twice.
    own.disable_default_handler()
    own.enable_propagation()


_HASHING = min(8, os.cpu_count() or 1)
"""Number of threads that hash tensors."""


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded; then all its processes must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own_part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a whole tensor, placed and sharded like `like`."""
    here = tensor.to(like.device)
    if not hasattr(like, "device_mesh") or hasattr(here, "device_mesh"):
        return here
    from torch.distributed.tensor import distribute_tensor

    placed: Any = like
    return distribute_tensor(here, placed.device_mesh, placed.placements, src_data_rank=None)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a SHA-256 of names, types, shapes and contents, by which changed weights are told.

    Nothing can be sampled while it is made, so tensors are hashed side by side, each by a thread.
    """

    def digest_tensor(name: str) -> str:
        tensor = tensors[name]
        content = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {[*tensor.shape]} {hashlib.sha256(content).hexdigest()}"

    with ThreadPoolExecutor(_HASHING, thread_name_prefix="digest") as threads:
        return hashlib.sha256("\n".join(threads.map(digest_tensor, sorted(tensors))).encode()).hexdigest()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, and its SHA-256 next to it. Raises StoreError."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        note_sum(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {path}: {error}; free some space and try again") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file that `save_tensors` wrote.

    Raises DamagedError if it has changed since, and StoreError if it cannot be read.
    """
    require_as_written(path)
    try:
        return load_file(path)  # type: ignore[no-any-return]
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot read weights from {path}: {error}") from error


_ADAPTER = ".default"
"""The name that peft gives to a model's first LoRA weights."""


def write_lora_folder(
    tensors: Mapping[str, torch.Tensor], lora: LoraOptions, *, base: str, folder: Path
) -> None:
    """Write LoRA tensors, with the names of `Policy.trainable`, as `adapter_model.safetensors`.

    Raises StoreError if the tensors are not LoRA weights or the folder cannot be written.
    """
    from peft import LoraConfig

    odd = [name for name in tensors if f"{_ADAPTER}.weight" not in name]
    if odd or not tensors:
        raise StoreError(f"these are not LoRA weights: {odd[0] if odd else 'there are none'}")
    if fused := [name for name in tensors if ".experts." in name]:
        raise StoreError(
            f"other engines do not take LoRA weights on all experts of a layer together ({fused[0]}): name "
            "the layers of the attention as 'target_modules' of 'lora', or export the merged model"
        )
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        plain = {
            name.replace(f"{_ADAPTER}.weight", ".weight"): value.detach().contiguous()
            for name, value in tensors.items()
        }
        save_file(plain, folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {folder}: {error}; free some space") from error
