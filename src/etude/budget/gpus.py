"""How many GPUs a run holds while it goes on."""

from __future__ import annotations

from etude.config.schema import Config
from etude.inference.local import LocalLlmConfig


def gpus_held(config: Config) -> float:
    """Those of this machine that models of `_type: local` are on, and those of the cluster's processes.

    An endpoint's are not counted, wherever it is.
    """
    devices = {llm.device for llm in config.llms.values() if isinstance(llm, LocalLlmConfig)}
    here = {device for wish in devices if (device := _cuda_device(wish)) is not None}
    cluster = config.cluster
    return len(here) + (0.0 if cluster is None else cluster.gpus(on_gpus=bool(here)))


def _cuda_device(wish: str) -> str | None:
    """The GPU that a wish stands for; None for another device, and where there is none."""
    if wish != "auto" and not wish.startswith("cuda"):
        return None
    try:
        from torch import cuda
    except ImportError:
        return None
    if not cuda.is_available():
        return None
    return wish if ":" in wish else "cuda:0"
