"""The machine's disk, and the size of models: rough numbers, for estimates."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The properties of a model that decide what it takes."""

    parameters: int
    trainable: int
    """Parameters that training changes."""
    bytes_per_parameter: float
    """Of the model as it is held."""
    device: str
    """`cpu`, `cuda` or `mps`."""
    prompt_tokens: float
    """Of an example's text as one user message, in the median; 0 when there is no text."""

    @property
    def version(self) -> int:
        """Bytes that a stored version takes: the trained weights, their masters and AdamW's two moments."""
        half = self.bytes_per_parameter < 4
        return int(self.trainable * (self.bytes_per_parameter + (12 if half else 8)))


def together(sizes: Sequence[ModelSize]) -> ModelSize | None:
    """Several models as if they were one; None for none."""
    if not sizes:
        return None
    return ModelSize(
        parameters=sum(size.parameters for size in sizes),
        trainable=sum(size.trainable for size in sizes),
        bytes_per_parameter=max(size.bytes_per_parameter for size in sizes),
        device=sizes[0].device,
        prompt_tokens=max(size.prompt_tokens for size in sizes),
    )


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest of the folders around it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or would be."""
    return shutil.disk_usage(existing_folder(path)).free
