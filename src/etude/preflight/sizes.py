"""How large a model is, and how fast this machine is with it: rough numbers, for estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides how long it takes."""

    parameters: int
    trainable: int
    """Parameters that training changes."""
    layers: int
    bytes_per_parameter: int
    device: str
    """`cpu`, `cuda` or `mps`."""
    prompt_tokens: float
    """Of an example's text as one user message, in the median; 0 when there is no text."""

    @property
    def memory(self) -> int:
        """Bytes that sampling and training take: the weights, and for what is trained the gradient, AdamW's
        two moments, a float32 master where weights are halves, and two copies to go back to. Activations are
        not counted."""
        half = self.bytes_per_parameter < 4
        extra = self.trainable * (2 * self.bytes_per_parameter + (16 if half else 12))
        return self.parameters * self.bytes_per_parameter + extra

    @property
    def version(self) -> int:
        """Bytes that a stored version takes: the trained weights, their masters and AdamW's two moments."""
        half = self.bytes_per_parameter < 4
        return self.trainable * (self.bytes_per_parameter + (12 if half else 8))


def together(sizes: Sequence[ModelSize]) -> ModelSize | None:
    """Several models as if they were one; None for none."""
    if not sizes:
        return None
    return ModelSize(
        parameters=sum(size.parameters for size in sizes),
        trainable=sum(size.trainable for size in sizes),
        layers=sum(size.layers for size in sizes),
        bytes_per_parameter=max(size.bytes_per_parameter for size in sizes),
        device=sizes[0].device,
        prompt_tokens=max(size.prompt_tokens for size in sizes),
    )


def shown_bytes(count: float) -> str:
    """`1.5 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
