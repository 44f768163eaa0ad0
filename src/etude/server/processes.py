"""How many processes train a job."""

from __future__ import annotations

from etude.core.errors import RequestError
from etude.server.settings import ServerSettings


def training_processes(settings: ServerSettings) -> int:
    """As many as the settings say, or else one for each GPU.

    Raises RequestError when there are more than GPUs to train on.
    """
    asked, gpus = settings.training_processes, _gpus(settings.device)
    if asked is not None and asked > 1 and gpus is not None and asked > gpus:
        there = "one device" if gpus == 1 else f"{gpus} GPUs"
        raise RequestError(
            f"--training-processes {asked} is too many: --device {settings.device} is {there} here; leave it "
            "out, or train with --device cpu"
        )
    return asked or gpus or 1


def _gpus(device: str) -> int | None:
    """Devices that a job can have; None on the CPU, which any number of processes share."""
    import torch

    if device == "cpu":
        return None
    if device in ("auto", "cuda"):
        count = torch.cuda.device_count()
        return count or (1 if torch.backends.mps.is_available() else None)
    return 1
