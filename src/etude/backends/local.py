"""The adapter `local`, which trains the model that the agents sample from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from etude.backends.trainer_adapter import LocalAdapterConfig, find_opponents, trained_model
from etude.config.finetuning import SHIPPED
from etude.config.registry import register_trainer_adapter
from etude.core.errors import CapabilityError
from etude.core.interfaces import innermost
from etude.engines.local import LocalLlmConfig, require_local_extra
from etude.store.files import private_folder

if TYPE_CHECKING:
    from etude.backends.local_adapter import LocalAdapter
    from etude.config.builder import Builder


def check_local(config: LocalAdapterConfig, builder: Builder) -> LocalLlmConfig:
    """Return the config of the run's target model. Raises CapabilityError if it cannot be trained here."""
    require_local_extra()
    llm, cluster = trained_model(builder, "local", LocalLlmConfig), builder.config.cluster
    if config.shard_training and (cluster is None or cluster.learners is None):
        raise CapabilityError(
            "`shard_training` splits the weights among processes, but the run's own process trains: "
            "set cluster.learners, or leave it out"
        )
    return llm


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local(config: LocalAdapterConfig, builder: Builder) -> AsyncIterator[LocalAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not a local model."""
    llm = check_local(config, builder)
    from etude.backends.cluster_training import Learners
    from etude.backends.local_adapter import LocalAdapter
    from etude.engines.embedded import EmbeddedEngine

    target = builder.config.finetuning.require_target()
    engine = innermost(await builder.get_llm(target))
    assert isinstance(engine, EmbeddedEngine)
    block = builder.config.finetuning
    trainer = builder.config.trainers.get(block.trainer or "")
    # Opponents are loaded from disk. `epochs` ends with a failed job, and a resumed run makes lost versions
    # again. Other trainers may continue, and then need the version before the job.
    writes_each = bool(find_opponents(builder.config.llms, target)) or (
        trainer is not None and trainer.type_name != SHIPPED["trainer"]
    )
    settings, learners = builder.config.cluster, None
    if settings is not None and settings.learners is not None and builder.run is not None:
        # One folder per model, because a run may train several.
        own = builder.checkpoints.relative_to(builder.run.checkpoints)
        folder = private_folder(builder.run.path.absolute() / "learners" / own)
        learners = Learners(await builder.get_cluster(), settings.learners, folder, llm.device)
    yield LocalAdapter(
        config, engine.policy, builder.checkpoints, block.seed, learners, writes_each=writes_each
    )
