"""Assembling trainers: the components that a config names, bound together."""

from __future__ import annotations

from dataclasses import replace

from etude.config.builder import TargetBuilder
from etude.core.errors import RequestError
from etude.loop.epoch_trainer import EpochTrainer
from etude.loop.shared_progress import SharedProgress
from etude.loop.targets import TargetsTrainer
from etude.loop.trainer import Trainer
from etude.runtime import Runtime


async def assemble_trainer(runtime: Runtime) -> Trainer:
    """The config's trainer with its builder, its adapter and the runtime bound; not initialized yet.

    Where there are `finetuning.targets`, it is a `TargetsTrainer`. Raises RequestError when the config's
    trainer is not made for several.
    """
    config = runtime.config
    if not config.finetuning.targets:
        return await _assemble_one(runtime)
    shared = SharedProgress(runtime.progress)
    members = {name: await _assemble_member(name, runtime, shared) for name in config.finetuning.targets}
    together = TargetsTrainer(config.trainers[_named(config.finetuning.trainer, "trainer")], members)
    together.bind_runtime(replace(runtime, progress=shared))
    return together


async def _assemble_one(runtime: Runtime) -> Trainer:
    """The trainer of one model."""
    finetuning, builder = runtime.config.finetuning, runtime.builder
    trajectory_builder = await builder.get_trajectory_builder(
        _named(finetuning.trajectory_builder, "trajectory_builder")
    )
    adapter = await builder.get_trainer_adapter(_named(finetuning.trainer_adapter, "trainer_adapter"))
    trainer: Trainer = await builder.get_trainer(_named(finetuning.trainer, "trainer"))
    await trainer.bind_components(trajectory_builder=trajectory_builder, trainer_adapter=adapter)
    trainer.bind_runtime(runtime)
    return trainer


async def _assemble_member(name: str, runtime: Runtime, shared: SharedProgress) -> EpochTrainer:
    """The trainer of one target, with components of its own."""
    builder = TargetBuilder(runtime.builder, name)
    own = builder.config.finetuning
    trainer = await _assemble_one(
        replace(
            runtime,
            config=builder.config,
            builder=builder,
            target_model=_named(own.target_model, "target_model"),
            progress=shared.view(name),
        )
    )
    if not isinstance(trainer, EpochTrainer):
        raise RequestError(
            f"finetuning.trainer '{own.trainer}' is a {type(trainer).__name__}, which trains one model; "
            "'finetuning.targets' needs `_type: epochs`, or a trainer that inherits from EpochTrainer"
        )
    trainer.bind_target(name, runtime.config.finetuning.targets[name])
    return trainer


def _named(name: str | None, key: str) -> str:
    if name is None:
        raise RequestError(f"'finetuning.{key}' is missing: name an entry of '{key}s'")
    return name
