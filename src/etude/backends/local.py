"""Training in this process: the model that the agents sample from is the one that is trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from etude.backends.local_config import LocalAdapterConfig
from etude.config.registry import register_trainer_adapter
from etude.core.errors import CapabilityError, RequestError
from etude.inference.local import require_local_extra

if TYPE_CHECKING:
    from etude.backends.local_adapter import LocalAdapter
    from etude.config.builder import Builder


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local(config: LocalAdapterConfig, builder: Builder) -> AsyncIterator[LocalAdapter]:
    """The adapter of the run's target model. Raises CapabilityError when that is not a local model."""
    require_local_extra()
    from etude.backends.local_adapter import LocalAdapter
    from etude.inference.embedded import EmbeddedEngine

    target = builder.config.finetuning.target_model
    if target is None:
        raise RequestError("'finetuning.target_model' is missing: name the entry of `llms` to train")
    engine = await builder.get_llm(target)
    if not isinstance(engine, EmbeddedEngine):
        kind = builder.config.llms[target].type_name
        raise CapabilityError(
            f"the trainer adapter 'local' trains models of `_type: local`, and llms.{target} is "
            f"`_type: {kind}`; make it local, or choose an adapter for its backend"
        )
    yield LocalAdapter(config, engine.policy, builder.checkpoints, builder.config.finetuning.seed)
