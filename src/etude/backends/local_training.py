"""What the local adapter's config means to the learner: algorithm, data and options of a job."""

from __future__ import annotations

from typing import Any

from etude.algorithms.algorithm import Algorithm, algorithm_of, groups_of
from etude.backends.hyperparameters import JobHyperparameters
from etude.backends.local_config import LocalAdapterConfig, LoraConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.call import ChatRequest
from etude.core.edge import Encoder
from etude.core.message import OpenAIMessage
from etude.core.sample import Unit
from etude.core.trajectory import TrajectoryCollection
from etude.learner.learner import LearnerOptions
from etude.learner.schedule import Schedule
from etude.models.template import ChatTemplate

_NO_MATTER = {"reward", "token_budget", "packing", "gradient_checkpointing"}
"""Keys that change how a job computes, and not what it learns."""


def for_algorithm(
    algorithm: Algorithm, config: LocalAdapterConfig, given: JobHyperparameters
) -> LocalAdapterConfig:
    """The config for a job of the algorithm, with what its maker gave in place of its own."""
    changes: dict[str, Any] = {}
    if given.num_epochs is not None:
        changes["passes"] = given.num_epochs
    if given.rl_learning_rate is not None and algorithm.kind != "imitation":
        changes["learning_rate"] = given.rl_learning_rate
    return config.model_copy(update=changes | {"lora": lora_with(config, given)})


def algorithm_for(collection: TrajectoryCollection, given: JobHyperparameters) -> Algorithm:
    """The algorithm that a collection says. Raises RequestError for an unknown one, and for its options."""
    algorithm = algorithm_of(collection.method, collection.options)
    if algorithm.kind == "pairs" and given.dpo_beta is not None:
        return algorithm_of(collection.method, {**collection.options, "beta": given.dpo_beta})
    return algorithm


def lora_with(config: LocalAdapterConfig, given: JobHyperparameters) -> LoraConfig | None:
    """The LoRA weights that are trained; None for all weights."""
    lora, rank, alpha = config.lora, given.lora_rank, given.lora_alpha
    if rank is None:
        return lora
    if not rank:
        return None
    changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
    return (lora or LoraConfig()).model_copy(update=changes)


def hyperparameters_of(
    algorithm: Algorithm, config: LocalAdapterConfig, schedule: Schedule, seed: int
) -> dict[str, Any]:
    """All that decides what a job learns from its data, as JSON."""
    return {
        "config": config.model_dump(mode="json", exclude=_NO_MATTER),
        "options": algorithm.gradient(),
        "epochs": None if config.lr_schedule == "constant" else schedule.trainings,
        "seed": seed,
    }


def units_of(
    collection: TrajectoryCollection, algorithm: Algorithm, template: ChatTemplate
) -> list[list[Unit]]:
    """The collection's samples or pairs, by group. Raises TrainingError for what cannot be trained on."""

    def prompt(asked: list[OpenAIMessage] | str) -> tuple[int, ...]:
        messages = [OpenAIMessage(role="user", content=asked)] if isinstance(asked, str) else asked
        return template.prompt(ChatRequest(tuple(message.to_wire() for message in messages))).ids

    return groups_of(collection, algorithm, Encoder(prompt, template.completion_ids))


def schedule_of(config: LocalAdapterConfig, run: FinetuneConfig) -> Schedule:
    """How the learning rate goes over the epochs of a run, each of which is one training."""
    epochs = 1 if run.fine_tune_from_scratch else run.num_epochs
    epochs = config.lr_schedule_epochs or epochs
    return Schedule(config.lr_schedule, config.warmup_steps, config.lr_floor, epochs)


def learner_options(config: LocalAdapterConfig, run: FinetuneConfig) -> LearnerOptions:
    """How the config takes optimiser steps in a run."""
    return LearnerOptions(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=schedule_of(config, run),
        passes=config.passes,
        batch_size=config.batch_size,
        token_budget=config.token_budget,
        packing=config.packing,
        gradient_checkpointing=config.gradient_checkpointing,
    )
