"""What hosted training would cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from etude.backends.openai_adapter import AUTO_EPOCHS, usd_for
from etude.backends.openai_config import OpenAiAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config


def training_cost(
    config: Config, blocks: Iterable[FinetuneConfig], episodes: int, tokens_per_episode: float
) -> tuple[float | None, tuple[str, ...]]:
    """USD for the jobs of a run at OpenAI, and how that was come by.

    None when nothing is trained there, or a price is not known. All of `episodes` are taken to be
    trained on, so it is the most that it should be.
    """
    total, told = 0.0, []
    for block in blocks:
        adapter = config.trainer_adapters.get(block.trainer_adapter or "")
        llm: Any = config.llms.get(block.target_model or "")
        if not block.enabled or not isinstance(adapter, OpenAiAdapterConfig):
            continue
        passes = AUTO_EPOCHS if adapter.n_epochs == "auto" else adapter.n_epochs
        model = str(getattr(llm, "model_name", ""))
        usd = None
        if adapter.reinforcement is None:
            usd = usd_for(episodes * tokens_per_episode * passes, adapter.usd_per_million_tokens, model)
        if usd is None:
            return None, (f"what OpenAI charges for training {model} is not known here",)
        total += usd
        told.append(
            f"every episode is trained on {passes} times in {model}, at "
            f"${usd / max(1e-12, episodes * tokens_per_episode * passes) * 1e6:g} for a million tokens; "
            "sampling not counted"
        )
    return (total, tuple(told)) if told else (None, ())
