"""A served model's weights in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.core.job import ModelVersion
from etude.server.models import ServedModel

if TYPE_CHECKING:
    from etude.models.policy import LoraOptions, Policy


def load_policy(
    source: str,
    model: ServedModel,
    *,
    device: str,
    dtype: str,
    lora: LoraOptions | None = None,
    seed: int = 0,
    keep_base: bool = False,
) -> Policy:
    """Load `source` with the trained tensors of `model` on it.

    `lora` puts new LoRA weights on a model that has none. `keep_base` keeps the tensors of `source` beside
    the trained ones. Raises RequestError when the source cannot be
    loaded, StoreError and EngineError when the tensors are missing, damaged or of another model.
    """
    from etude.models.policy import LoraOptions, Policy

    policy = Policy.load(source, device=device, dtype=dtype)
    if model.lora is not None:
        policy.use_lora(LoraOptions(model.lora["r"], model.lora["alpha"]), 0)
    if keep_base and model.folder is not None:
        policy.keep_base()
    if model.folder is not None:
        policy.adopt(ModelVersion(number=1, location=str(model.folder), digest=model.digest))
    if lora is not None:
        policy.use_lora(lora, seed)
    return policy
