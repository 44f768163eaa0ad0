"""How many GPUs a run holds while it goes on."""

from __future__ import annotations

from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.inference.local import LocalLlmConfig


def gpus_held(config: Config) -> float:
    """Those of this machine that models of `_type: local` are on, and those of the cluster's processes.

    An endpoint's are not counted, wherever it is.
    """
    devices = _devices(config)
    here = {device for wish in devices if (device := _cuda_device(wish)) is not None}
    on_gpus = bool(here) or any(wish.startswith("cuda") for wish in devices)
    cluster = config.cluster
    return len(here) + (0.0 if cluster is None else cluster.gpus(on_gpus=on_gpus))


def require_counted(config: Config) -> None:
    """Raise RequestError for a limit of GPU hours that would never be reached, or not in time.

    Whether learners take GPUs is known to the cluster alone where neither their number nor a device is given.
    """
    if config.budget is None or config.budget.gpu_hours is None:
        return
    cluster, held = config.cluster, gpus_held(config)
    is_open = cluster is not None and cluster.gpus(on_gpus=True) != cluster.gpus(on_gpus=False)
    if is_open and "auto" in _devices(config):
        raise RequestError(
            "budget.gpu_hours is set, and how many GPUs the learners take is known to the cluster alone: "
            "set cluster.learner_gpus"
        )
    if not held:
        raise RequestError(
            "budget.gpu_hours is set, and the run holds no GPU that could be counted: no entry of `llms` is "
            "on a GPU of this machine, and those of endpoints are not counted; set budget.hours in its place"
        )


def _devices(config: Config) -> set[str]:
    return {llm.device for llm in config.llms.values() if isinstance(llm, LocalLlmConfig)}


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
