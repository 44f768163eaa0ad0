"""Etude: fine-tune the models inside LLM agents from the agents' own runs.

Everything public is importable from here, and loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.algorithms.algorithm import Algorithm, OfGradient
    from etude.algorithms.distillation import Distillation
    from etude.algorithms.dpo import Dpo
    from etude.algorithms.expert_iteration import ExpertIteration, Supervised
    from etude.algorithms.grpo import Grpo
    from etude.algorithms.malt import Malt
    from etude.algorithms.reinforce import ReinforcePP, Rloo
    from etude.algorithms.trajectory_builder import TrajectoryBuilder
    from etude.backends.capabilities import Capabilities
    from etude.backends.trainer_adapter import TrainerAdapter
    from etude.config.builder import Builder
    from etude.config.component import DatasetConfig, EvaluatorConfig, LlmConfig, WorkflowConfig
    from etude.config.finetuning import (
        FinetuneConfig,
        TrainerAdapterConfig,
        TrainerConfig,
        TrajectoryBuilderConfig,
    )
    from etude.config.load import load_config
    from etude.config.registry import (
        register_dataset,
        register_evaluator,
        register_llm,
        register_trainer,
        register_trainer_adapter,
        register_trajectory_builder,
        register_workflow,
    )
    from etude.config.schema import Config
    from etude.core.call import ChatRequest, Completion
    from etude.core.errors import ConfigError, EtudeError, RequestError
    from etude.core.evaluation import EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
    from etude.core.example import Example
    from etude.core.interfaces import Engine, Evaluator
    from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
    from etude.core.sample import Pair, Sample, Turn
    from etude.core.skipped import Skipped
    from etude.core.trajectory import DPOItem, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
    from etude.groups.openai_group import OpenAiSharedModelGroup
    from etude.groups.shared import SharedModelGroup
    from etude.jobs.content import JobNameTakenError
    from etude.loop.interface import Trainer
    from etude.loop.trainer import EpochTrainer
    from etude.rewards.evaluator import evaluator
    from etude.rollout.episode import Episode, SyncEpisode
    from etude.rollout.function import function
    from etude.rollout.reply import Reply, ToolCall
    from etude.rollout.workflow import workflow
    from etude.run import Run, TrainedModel
    from etude.verbs import evaluate, evaluate_async, load_run, resume, resume_async, train, train_async

    __version__: str

_HOMES = {
    "etude.algorithms.algorithm": (
        "Algorithm",
        "OfGradient",
    ),
    "etude.algorithms.distillation": ("Distillation",),
    "etude.algorithms.dpo": ("Dpo",),
    "etude.algorithms.expert_iteration": (
        "ExpertIteration",
        "Supervised",
    ),
    "etude.algorithms.grpo": ("Grpo",),
    "etude.algorithms.malt": ("Malt",),
    "etude.algorithms.reinforce": (
        "ReinforcePP",
        "Rloo",
    ),
    "etude.algorithms.trajectory_builder": ("TrajectoryBuilder",),
    "etude.backends.capabilities": ("Capabilities",),
    "etude.backends.trainer_adapter": ("TrainerAdapter",),
    "etude.config.builder": ("Builder",),
    "etude.config.component": (
        "DatasetConfig",
        "EvaluatorConfig",
        "LlmConfig",
        "WorkflowConfig",
    ),
    "etude.config.finetuning": (
        "FinetuneConfig",
        "TrainerAdapterConfig",
        "TrainerConfig",
        "TrajectoryBuilderConfig",
    ),
    "etude.config.load": ("load_config",),
    "etude.config.registry": (
        "register_dataset",
        "register_evaluator",
        "register_llm",
        "register_trainer",
        "register_trainer_adapter",
        "register_trajectory_builder",
        "register_workflow",
    ),
    "etude.config.schema": ("Config",),
    "etude.core.call": (
        "ChatRequest",
        "Completion",
    ),
    "etude.core.errors": (
        "ConfigError",
        "EtudeError",
        "RequestError",
    ),
    "etude.core.evaluation": (
        "EvalInputItem",
        "EvalOutput",
        "EvalOutputItem",
        "EvaluationRunOutput",
    ),
    "etude.core.example": ("Example",),
    "etude.core.interfaces": (
        "Engine",
        "Evaluator",
    ),
    "etude.core.job": (
        "ModelVersion",
        "TrainingJobRef",
        "TrainingJobStatus",
        "TrainingStatusEnum",
    ),
    "etude.core.sample": (
        "Pair",
        "Sample",
        "Turn",
    ),
    "etude.core.skipped": ("Skipped",),
    "etude.core.trajectory": (
        "DPOItem",
        "EpisodeItem",
        "EpisodeItemRole",
        "Trajectory",
        "TrajectoryCollection",
    ),
    "etude.groups.openai_group": ("OpenAiSharedModelGroup",),
    "etude.groups.shared": ("SharedModelGroup",),
    "etude.jobs.content": ("JobNameTakenError",),
    "etude.loop.interface": ("Trainer",),
    "etude.loop.trainer": ("EpochTrainer",),
    "etude.rewards.evaluator": ("evaluator",),
    "etude.rollout.episode": (
        "Episode",
        "SyncEpisode",
    ),
    "etude.rollout.function": ("function",),
    "etude.rollout.reply": (
        "Reply",
        "ToolCall",
    ),
    "etude.rollout.workflow": ("workflow",),
    "etude.run": (
        "Run",
        "TrainedModel",
    ),
    "etude.verbs": (
        "evaluate",
        "evaluate_async",
        "load_run",
        "resume",
        "resume_async",
        "train",
        "train_async",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "Builder",
    "Capabilities",
    "ChatRequest",
    "Completion",
    "Config",
    "ConfigError",
    "DPOItem",
    "DatasetConfig",
    "Distillation",
    "Dpo",
    "Engine",
    "Episode",
    "EpisodeItem",
    "EpisodeItemRole",
    "EpochTrainer",
    "EtudeError",
    "EvalInputItem",
    "EvalOutput",
    "EvalOutputItem",
    "EvaluationRunOutput",
    "Evaluator",
    "EvaluatorConfig",
    "Example",
    "ExpertIteration",
    "FinetuneConfig",
    "Grpo",
    "JobNameTakenError",
    "LlmConfig",
    "Malt",
    "ModelVersion",
    "OfGradient",
    "OpenAiSharedModelGroup",
    "Pair",
    "ReinforcePP",
    "Reply",
    "RequestError",
    "Rloo",
    "Run",
    "Sample",
    "SharedModelGroup",
    "Skipped",
    "Supervised",
    "SyncEpisode",
    "ToolCall",
    "TrainedModel",
    "Trainer",
    "TrainerAdapter",
    "TrainerAdapterConfig",
    "TrainerConfig",
    "TrainingJobRef",
    "TrainingJobStatus",
    "TrainingStatusEnum",
    "Trajectory",
    "TrajectoryBuilder",
    "TrajectoryBuilderConfig",
    "TrajectoryCollection",
    "Turn",
    "WorkflowConfig",
    "__version__",
    "evaluate",
    "evaluate_async",
    "evaluator",
    "function",
    "load_config",
    "load_run",
    "register_dataset",
    "register_evaluator",
    "register_llm",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
    "register_workflow",
    "resume",
    "resume_async",
    "train",
    "train_async",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version(__name__)
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'etude' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
