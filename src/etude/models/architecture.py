"""The facts about a model's architecture that others rely on; its LoRA weights; and where it runs.

That is which layers take LoRA weights, how these become a part of it, and bases of four bits.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import nn

from etude.core.errors import MissingExtraError, RequestError, first_line

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


_TIED = "Model has `tie_word_embeddings=True`"
"""How a warning of peft begins: it would merge LoRA weights into a shared weight, and `merged` does not."""


def with_lora(model: Any, config: Any) -> Any:
    """Put LoRA weights on a model, by a `LoraConfig` of peft.

    Raises RequestError for names of no layer that takes them, and for a layer whose weight others share.
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
    # peft has taken out the names of experts that transformers holds as one tensor.
    names = sorted(config.target_modules) if is_named else []
    if why := _why_not(layers, names, excluded) or why or _why_shared(model):
        raise RequestError(f"LoRA weights do not fit this model: {why}")
    return model


def merged(model: Any) -> Any:
    """A copy of a model with LoRA weights that has these in its own.

    Where the head is the embedding and one of the two has LoRA weights, the copy has a head of its own.
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


def base_layer(layer: Any) -> Any:
    """A layer without its LoRA weights."""
    return getattr(layer, "base_layer", layer)


def _why_not(layers: Mapping[str, Any], names: Sequence[str], excluded: Set[str]) -> str | None:
    """Why LoRA weights cannot be put on layers with these names, or ends of names; None if they can."""
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
    """Why LoRA weights on a model cannot be merged; None if they can.

    A weight may be that of several layers. Head and embedding can be made two.
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


def require_four_bits(device: torch.device) -> None:
    """Raise RequestError where there are no such weights, and MissingExtraError without bitsandbytes."""
    if device.type != "cuda":
        raise RequestError(
            f"quantization '4bit' needs a CUDA device, and the model is to run on '{device.type}': leave "
            "'quantization' out, or take a machine with an NVIDIA GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise MissingExtraError("quantization '4bit' (bitsandbytes not installed)", "bnb")


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


def choose_device(wish: str = "auto") -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:1`, `mps`: the best there is, or the one wished for.

    Raises RequestError when the wished-for device is not there.
    """
    if wish == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise RequestError(f"device '{wish}' is not known; use auto, cpu, cuda, cuda:N or mps") from error
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable.get(device.type, False):
        raise RequestError(f"device '{wish}' is not available on this machine; use device: auto or cpu")
    return device


def choose_dtype(wish: str, device: torch.device, parameters: int) -> torch.dtype:
    """The type of a model's weights: `auto` is bfloat16 on CUDA, and on CPUs that multiply it for a model of
    10 million parameters or more. Elsewhere it is float32: bfloat16 is slower there and less exact.

    Raises RequestError for a type that is not known.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wish == "auto":
        is_faster = device.type == "cpu" and is_large(parameters) and multiplies_bfloat16()
        return torch.bfloat16 if device.type == "cuda" or is_faster else torch.float32
    if wish not in known:
        raise RequestError(f"dtype '{wish}' is not known; use auto, {', '.join(known)}")
    return known[wish]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of plain memory on a device, without a wait for what CUDA was asked for before.

    CUDA takes the numbers of memory that is not pinned before the call is over; Metal may do so later.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `choose_dtype` knows a type by."""
    return str(dtype).removeprefix("torch.")


def is_large(parameters: int) -> bool:
    """Whether a CPU spends its time on what a model computes, and not on calls.

    It is faster then in bfloat16, where it has that, and with all of its cores.
    """
    return parameters >= 10_000_000


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it (AVX512-BF16 or AMX), and so is faster than in float32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # Since torch 2.11.
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def limit_threads(parameters: int = 0) -> None:
    """Let torch use one core, or all for a large model, unless the user's environment says otherwise.

    Small models lose more to OpenMP's busy waiting than a second thread gives, and with a busy
    neighbour they lose all of it. A fixed count also makes sums come out the same every time.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores() if is_large(parameters) else 1)
