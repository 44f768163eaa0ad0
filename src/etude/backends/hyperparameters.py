"""Hyperparameters of jobs that come from their maker, and go before those of the adapter's config."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.core.errors import CapabilityError
from etude.core.trajectory import Method


@dataclass(frozen=True, slots=True)
class JobHyperparameters:
    """How jobs are to train. None leaves it to the adapter's config."""

    num_epochs: int | None = None
    """Times that a job goes over its data."""
    rl_learning_rate: float | None = None
    """The learning rate of `dpo` and `grpo`."""
    dpo_beta: float | None = None
    """How hard preferences pull away from the reference, in `dpo`."""
    lora_rank: int | None = None
    """Rank of the LoRA weights; 0 trains all weights."""
    lora_alpha: float | None = None
    """Scale of the LoRA weights."""

    def given(self) -> dict[str, Any]:
        """Those that say something, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def refuse_all_but(self, known: Collection[str], backend: str) -> None:
        """Raise CapabilityError for one that is given and not among `known`."""
        refused = [f"{name} ({value})" for name, value in self.given().items() if name not in known]
        if refused:
            raise CapabilityError(
                f"the trainer adapter '{backend}' cannot be told {', '.join(refused)}: leave it out, or "
                "choose another adapter" + (f". It can be told {', '.join(sorted(known))}" if known else "")
            )

    def for_api(self, method: Method) -> dict[str, Any]:
        """As the fine-tuning API names them, for a job of the method."""
        named = {"n_epochs": self.num_epochs, "lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha}
        if kind_of(method) != "imitation":
            named["learning_rate"] = self.rl_learning_rate
        if kind_of(method) == "pairs":
            named["beta"] = self.dpo_beta
        return {name: value for name, value in named.items() if value is not None}
