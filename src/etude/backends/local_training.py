"""What the local adapter's config means to the learner: data, objective and options of a job."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from etude.backends.hyperparameters import JobHyperparameters
from etude.backends.local_config import LocalAdapterConfig, LoraConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.call import ChatRequest
from etude.core.message import OpenAIMessage
from etude.core.trajectory import Method, TrajectoryCollection
from etude.learner.batch import TrainingBatch
from etude.learner.collate import dpo_batch, grpo_batch, supervised_batch
from etude.learner.dpo import Dpo
from etude.learner.grpo import Grpo
from etude.learner.kl_reward import with_kl_in_rewards
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import Objective
from etude.learner.schedule import Schedule
from etude.learner.sft import Sft
from etude.models.template import ChatTemplate

_NO_MATTER = {"reward", "token_budget", "packing", "gradient_checkpointing"}
"""Keys that change how a job computes, and not what it learns."""


def for_method(method: Method, config: LocalAdapterConfig, given: JobHyperparameters) -> LocalAdapterConfig:
    """The config for a job of the method, with what its maker gave in place of its own."""
    changes: dict[str, Any] = {}
    if given.num_epochs is not None:
        changes["passes"] = given.num_epochs
    if given.rl_learning_rate is not None and method != "supervised":
        changes["learning_rate"] = given.rl_learning_rate
    if given.dpo_beta is not None:
        changes["dpo"] = config.dpo.model_copy(update={"beta": given.dpo_beta})
    return config.model_copy(update=changes | {"lora": lora_with(config, given)})


def lora_with(config: LocalAdapterConfig, given: JobHyperparameters) -> LoraConfig | None:
    """The LoRA weights that are trained; None for all weights."""
    lora, rank, alpha = config.lora, given.lora_rank, given.lora_alpha
    if rank is None:
        return lora
    if not rank:
        return None
    changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
    return (lora or LoraConfig()).model_copy(update=changes)


def hyperparameters_of(config: LocalAdapterConfig, schedule: Schedule, seed: int) -> dict[str, Any]:
    """All that decides what a job learns from its data, as JSON."""
    return {
        "config": config.model_dump(mode="json", exclude=_NO_MATTER),
        "epochs": None if config.lr_schedule == "constant" else schedule.trainings,
        "seed": seed,
    }


def batch_of(
    collection: TrajectoryCollection, config: LocalAdapterConfig, template: ChatTemplate
) -> TrainingBatch:
    """The collection as token sequences. Raises TrainingError for what cannot be trained on."""

    def tokenise(prompt: list[OpenAIMessage] | str, response: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        messages = [OpenAIMessage(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        request = ChatRequest(tuple(message.to_wire() for message in messages))
        return template.prompt(request).ids, template.completion_ids(response)

    match collection.method:
        case "grpo":
            return grpo_batch(collection, config.grpo.advantage_scale)
        case "dpo":
            return dpo_batch(collection, tokenise, needs_logprobs=config.dpo.reference == "sampler")
        case "supervised":
            return supervised_batch(collection, template.completion_ids)


def data_at(
    collection: TrajectoryCollection, config: LocalAdapterConfig, learner: Learner
) -> tuple[TrajectoryCollection, dict[str, float]]:
    """The collection with the rewards that count, seen from the weights as they are, and facts about that."""
    if collection.method != "grpo" or not config.grpo.reward_kl:
        return collection, {}
    priced, mean = with_kl_in_rewards(collection, config.grpo.reward_kl, learner.divergences)
    return priced, {"kl_in_reward": mean}


def objective_of(method: Method, config: LocalAdapterConfig) -> Objective:
    """The objective of a training method, with the config's options."""
    grpo, dpo = config.grpo, config.dpo
    match method:
        case "grpo":
            return Grpo(**{field.name: getattr(grpo, field.name) for field in fields(Grpo)})
        case "dpo":
            return Dpo(dpo.beta, dpo.label_smoothing, dpo.loss, dpo.reference)
        case "supervised":
            return Sft()


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
