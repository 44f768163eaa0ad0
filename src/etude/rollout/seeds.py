"""The dataset of environments that make their own tasks: an example is a seed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.core.example import Example
from etude.core.keys import generator

if TYPE_CHECKING:
    from etude.config.builder import Builder

_BITS = 30


class SeedsConfig(DatasetConfig, name="seeds"):
    """Examples that are a seed each, for environments that make a task of one. More of them begin with the
    same ones, and those of the two splits are never the same, whatever their `seed`."""

    size: int = Field(default=256, ge=1, le=2**20)
    """How many examples."""
    seed: int = Field(default=0, ge=0)
    """Draws other examples."""
    split: Literal["train", "validation"] = "train"
    """Training takes even numbers, validation odd ones."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """Further inputs, the same in each example."""

    def examples(self) -> list[Example]:
        """The examples: the id is `seed-` and the number, which is less than 2**31 and stands in `seed`."""
        draw, numbers = generator(self.seed, "seeds", self.split), dict[int, None]()
        while len(numbers) < self.size:
            numbers[2 * draw.getrandbits(_BITS) + (self.split == "validation")] = None
        return [Example(f"seed-{number}", {**self.inputs, "seed": number}) for number in numbers]


@register_dataset(config_type=SeedsConfig)
async def seeds(config: SeedsConfig, builder: Builder) -> AsyncIterator[SeedsConfig]:
    """The registered component `seeds`."""
    yield config
