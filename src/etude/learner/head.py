"""The head of a language model without its body: logits after chosen tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from etude.models.architecture import logit_error, logits_after, text_config, without_lora
from etude.models.device import copy_to_device
from etude.models.distribution import Adjustment, adjust_logits

_HELD = 1 << 28
"""Maximum bytes of logits held at a time on a CPU, in the model's precision."""
_HELD_ON_GPU = 1 << 30
"""The same on a GPU. Each chunk reads the head's weights again, and adds to their gradient."""
_IN_CACHE = 1 << 18
"""Logits that a CPU computes in float32 at a time: a megabyte of its cache."""
_COPIES = 8
"""How many times the memory logits take if more than their temperature changes: copies in float32."""

_EXTRAS = "logit_scale", "logits_scaling", "final_logit_softcapping"
"""Settings of Cohere, Granite and Gemma; a trial run finds out what other models do."""

Shapes: TypeAlias = Sequence[Adjustment | None]
"""How the tokens' distributions differ from the model's own; None if they do not."""


def last_hidden(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the last hidden states [B, T, D] of a plain forward pass."""
    hidden_BTD: Tensor = without_lora(model).base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden_BTD


@dataclass(frozen=True, slots=True)
class Head:
    """The step from last hidden states to logits."""

    logits: Callable[[Tensor], Tensor]
    """Maps hidden states [E, D] to logits [E, V]."""
    weight_VD: Tensor | None = None
    """The weight, if logits are just the product with it, on a CPU or CUDA."""

    @classmethod
    def find(cls, model: Any) -> Head:
        """Return the head of a model for which `has_plain_head` is true."""
        module, config = without_lora(model).get_output_embeddings(), text_config(model)
        plain = type(module) is nn.Linear and module.bias is None and "forward" not in vars(module)
        if any(getattr(config, name, None) not in (None, 1.0) for name in _EXTRAS) or not plain:
            return cls(partial(head_logits, model))
        is_here = type(module.weight) is nn.Parameter and module.weight.device.type in ("cpu", "cuda")
        hooked = module._forward_pre_hooks or module._forward_hooks
        return cls(partial(head_logits, model), module.weight if is_here and not hooked else None)


def head_logits(model: Any, hidden_ED: Tensor) -> Tensor:
    """Return the logits [E, V] of last hidden states."""
    logits: Tensor = without_lora(model).get_output_embeddings()(hidden_ED)
    config = text_config(model)
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Return whether `head_logits` of the last hidden states are the model's logits, in a trial run."""
    weight, size = next(model.parameters()), text_config(model).vocab_size
    ids_1T = (torch.arange(6, device=weight.device) * 7 % size)[None]
    try:
        logits = head_logits(model, last_hidden(model, ids_1T)[0])
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError):
        return False
    plain = logits_after(model, ids_1T, torch.arange(6, device=weight.device))[0]
    return logits.shape == plain.shape and logit_error(logits, plain, weight.dtype) is None


def selective_logprobs(
    head: Head, hidden_ED: Tensor, targets_E: Tensor, shapes_E: Shapes, vocabulary: int
) -> Tensor:
    """Return the logprobs [E] of `targets_E` after `hidden_ED`, in distributions of the given shapes.

    The number of logits held at a time is limited. All chunks but the last are computed again for the
    gradient, chunk by chunk.
    """
    tempered = all(shape is None or shape.is_tempered for shape in shapes_E)
    chosen = _tempered_logprobs if tempered and head.weight_VD is not None else _shaped_logprobs
    held = (_HELD_ON_GPU if hidden_ED.is_cuda else _HELD) // hidden_ED.element_size()
    size = max(1, held // vocabulary // (1 if chosen is _tempered_logprobs else _COPIES))
    shapes = [shapes_E[start : start + size] for start in range(0, len(shapes_E), size)] or [shapes_E]
    parts = list(zip(torch.split(hidden_ED, size), torch.split(targets_E, size), shapes, strict=True))
    made = [
        checkpoint(chosen, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts[:-1]
    ]
    # The gradient needs the last chunk first, so its logits can stay in memory until then.
    made.append(chosen(head, *parts[-1]))
    return torch.cat(made)


def _shaped_logprobs(head: Head, hidden_ED: Tensor, targets_E: Tensor, shapes_E: Shapes) -> Tensor:
    logits_EV = adjust_logits(head.logits(hidden_ED), shapes_E, targets_E)
    return -F.cross_entropy(logits_EV, targets_E, reduction="none")


def _tempered_logprobs(head: Head, hidden_ED: Tensor, targets_E: Tensor, shapes_E: Shapes) -> Tensor:
    heat = [1.0 if shape is None else shape.temperature for shape in shapes_E]
    cold_E1 = (
        None if set(heat) <= {1.0} else copy_to_device(1 / torch.tensor(heat)[:, None], hidden_ED.device)
    )
    made: Tensor = _Tempered.apply(hidden_ED, head.weight_VD, targets_E, cold_E1)  # type: ignore[no-untyped-call]
    return made


class _Tempered(torch.autograd.Function):
    """Logprobs of some tokens under softmax(c · hidden · weight), computed in float32.

    The product's logits are kept, and later overwritten by their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ED: Tensor, weight_VD: Tensor, targets_E: Tensor, cold_E1: Tensor | None
    ) -> Tensor:
        """Return the logprobs [E]; `cold_E1` is one over the temperatures."""
        logits_EV = hidden_ED @ weight_VD.t()
        found_E1 = hidden_ED.new_empty(len(targets_E), 1, dtype=torch.float32)
        sums_E1 = hidden_ED.new_empty(len(targets_E), 1, dtype=torch.float32)
        for rows in _rows(logits_EV):
            cold_R1 = None if cold_E1 is None else cold_E1[rows]
            logits_RV = _cool(logits_EV[rows], cold_R1)
            sums_E1[rows] = torch.logsumexp(logits_RV, dim=-1, keepdim=True)
            found_E1[rows] = logits_RV.gather(1, targets_E[rows, None]) - sums_E1[rows]
        ctx.save_for_backward(hidden_ED, weight_VD, targets_E, cold_E1, logits_EV, sums_E1)
        return found_E1.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad_E: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ED, weight_VD, targets_E, cold_E1, logits_EV, sums_E1 = ctx.saved_tensors
        for rows in _rows(logits_EV):
            cold_R1 = None if cold_E1 is None else cold_E1[rows]
            # With probabilities p, the gradient of log p_t is 1_t - p. It overwrites the logits.
            grad_R1, logits_RV = grad_E[rows, None], logits_EV[rows]
            grad_RV = _cool(logits_RV, cold_R1).sub_(sums_E1[rows]).exp_().mul_(grad_R1).neg_()
            grad_RV.scatter_add_(1, targets_E[rows, None], grad_R1)
            logits_RV.copy_(grad_RV if cold_R1 is None else grad_RV.mul_(cold_R1))
        of_hidden = logits_EV @ weight_VD if ctx.needs_input_grad[0] else None
        of_weight = logits_EV.t() @ hidden_ED if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, None, None


def _rows(logits_EV: Tensor) -> Iterator[slice]:
    """Return slices of all rows; on a CPU, each is small enough to stay in the cache."""
    size = max(1, len(logits_EV) if logits_EV.is_cuda else _IN_CACHE // logits_EV.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits_EV), size))


def _cool(logits_RV: Tensor, cold_R1: Tensor | None) -> Tensor:
    """Return the logits over the temperature, as a copy in float32."""
    logits_RV = logits_RV.to(torch.float32, copy=True)
    return logits_RV if cold_R1 is None else logits_RV.mul_(cold_R1)
