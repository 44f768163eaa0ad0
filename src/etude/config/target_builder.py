"""The builder of one target among several: what trains is its own, and everything else is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from etude.config.builder import Builder
from etude.config.component import ComponentConfig
from etude.config.registry import Kind

_OWN: frozenset[Kind] = frozenset({"trajectory_builders", "trainer_adapters", "trainers"})


class TargetBuilder(Builder):
    """Hands out a target's own trajectory builder, adapter and trainer, and the run's models and evaluators.

    `config.finetuning` is the block as it would be if the target were the only one, so that a component
    need not know whether it is. What is built here is closed with the run's builder.
    """

    def __init__(self, builder: Builder, target: str) -> None:
        finetuning = builder.config.finetuning.for_target(target)
        super().__init__(builder.config.model_copy(update={"finetuning": finetuning}), builder.run)
        self.target = target
        self._shared = builder
        self._exits = builder._exits

    @property
    def checkpoints(self) -> Path:
        """Versions of several models never share a folder."""
        folder = super().checkpoints / _folder_name(str(self.config.finetuning.target_model))
        folder.mkdir(exist_ok=True)
        return folder

    async def _once(self, kind: Kind, name: str, config: ComponentConfig) -> Any:
        if kind not in _OWN:
            return await self._shared._once(kind, name, config)
        # A copy: trainers write the target's reward function into the configs.
        return await super()._once(kind, name, config.model_copy(deep=True))


def _folder_name(model: str) -> str:
    """A name that stays within its parent, whatever the model is called."""
    name = quote(model, safe=" +@=")
    return "%2E" + name[1:] if name.startswith(".") else name
