"""Gradient checkpointing: what happens inside a layer is computed again for the gradient, and not kept.

(Chen et al., 2016.) The switch of `transformers` works in training mode only, where models also drop
activations at random; here the layers themselves are wrapped, for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from etude.core.errors import RequestError
from etude.learner.tree_attention import attending
from etude.models.architecture import text_config


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers that can be computed again. Raises RequestError for a model that does not name them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        kind = text_config(model).model_type
        raise RequestError(
            f"gradient_checkpointing: models of the type '{kind}' do not say what their layers are; leave it "
            "out, and lower token_budget where memory is short"
        )
    return layers


@contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """A forward pass within the block keeps only what goes from layer to layer. Raises RequestError."""
    layers, config = layers_of(model), text_config(model)
    for layer in layers:
        layer.forward = partial(_twice, config, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def is_checkpointed(layer: Any) -> bool:
    """Whether a layer is one of those within `checkpointed`, and nothing else stands before it."""
    forward = vars(layer).get("forward")
    known = isinstance(forward, partial) and forward.func is _twice
    return known and getattr(forward.args[1], "__func__", None) is type(layer).forward


def _twice(config: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    attention = config._attn_implementation

    def run(*args: Any, **kwargs: Any) -> Any:
        # The second time is in the backward pass, when the model may attend in another way again.
        with attending(config, attention):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
