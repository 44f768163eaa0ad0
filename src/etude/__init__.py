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
    from etude.algorithms.expert_iteration import ExpertIteration
    from etude.algorithms.grpo import Grpo
    from etude.algorithms.malt import Malt
    from etude.algorithms.reinforce_pp import ReinforcePP
    from etude.algorithms.rloo import Rloo
    from etude.algorithms.supervised import Supervised
    from etude.algorithms.trajectory_builder import TrajectoryBuilder
    from etude.backends.capabilities import Capabilities
    from etude.backends.job_content import JobNameTakenError
    from etude.backends.lm_client import LanguageModelClient
    from etude.backends.lm_errors import LanguageModelClientError
    from etude.backends.openai_errors import TrainingJobNotFoundClientError
    from etude.backends.trainer_adapter import TrainerAdapter
    from etude.config.builder import Builder
    from etude.config.component import DatasetConfig, EvaluatorConfig, LlmConfig, WorkflowConfig
    from etude.config.finetuning import (
        CurriculumLearningConfig,
        FinetuneConfig,
        FinetuneRunConfig,
        RewardFunctionConfig,
        TargetConfig,
        TrainerAdapterConfig,
        TrainerConfig,
        TrajectoryBuilderConfig,
    )
    from etude.config.load import load_config, parse_config
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
    from etude.core.errors import BackendError, ConfigError, EtudeError, RequestError
    from etude.core.evaluation import (
        EvalInput,
        EvalInputItem,
        EvalOutput,
        EvalOutputItem,
        EvaluationRunOutput,
    )
    from etude.core.example import Example
    from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
    from etude.core.message import OpenAIMessage
    from etude.core.sample import Pair, Sample, Turn
    from etude.core.skipped import DryRun, Frozen, Skipped
    from etude.core.trajectory import (
        DPOItem,
        EpisodeItem,
        EpisodeItemRole,
        Trajectory,
        TrajectoryCollection,
    )
    from etude.groups.openai_group import OpenAiSharedModelGroup
    from etude.groups.shared import SharedModelGroup
    from etude.inference.engine import Engine
    from etude.loop.trainer import Trainer
    from etude.rewards.evaluator import Evaluator
    from etude.rewards.function_evaluator import evaluator
    from etude.rollout.blocking import SyncEpisode
    from etude.rollout.episode import Episode, Reply
    from etude.rollout.reply import ToolCall
    from etude.rollout.workflow import function, workflow

    __version__: str

_HOMES = {
    "etude.backends.capabilities": ("Capabilities",),
    "etude.backends.job_content": ("JobNameTakenError",),
    "etude.backends.lm_client": ("LanguageModelClient",),
    "etude.backends.lm_errors": ("LanguageModelClientError",),
    "etude.backends.openai_errors": ("TrainingJobNotFoundClientError",),
    "etude.backends.trainer_adapter": ("TrainerAdapter",),
    "etude.algorithms.algorithm": ("Algorithm", "OfGradient"),
    "etude.algorithms.distillation": ("Distillation",),
    "etude.algorithms.dpo": ("Dpo",),
    "etude.algorithms.expert_iteration": ("ExpertIteration",),
    "etude.algorithms.grpo": ("Grpo",),
    "etude.algorithms.malt": ("Malt",),
    "etude.algorithms.reinforce_pp": ("ReinforcePP",),
    "etude.algorithms.rloo": ("Rloo",),
    "etude.algorithms.supervised": ("Supervised",),
    "etude.algorithms.trajectory_builder": ("TrajectoryBuilder",),
    "etude.config.builder": ("Builder",),
    "etude.config.component": ("DatasetConfig", "EvaluatorConfig", "LlmConfig", "WorkflowConfig"),
    "etude.config.finetuning": (
        "CurriculumLearningConfig",
        "FinetuneConfig",
        "FinetuneRunConfig",
        "RewardFunctionConfig",
        "TargetConfig",
        "TrainerAdapterConfig",
        "TrainerConfig",
        "TrajectoryBuilderConfig",
    ),
    "etude.config.load": ("load_config", "parse_config"),
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
    "etude.core.call": ("ChatRequest", "Completion"),
    "etude.core.errors": ("BackendError", "ConfigError", "EtudeError", "RequestError"),
    "etude.core.evaluation": (
        "EvalInput",
        "EvalInputItem",
        "EvalOutput",
        "EvalOutputItem",
        "EvaluationRunOutput",
    ),
    "etude.core.example": ("Example",),
    "etude.core.job": ("ModelVersion", "TrainingJobRef", "TrainingJobStatus", "TrainingStatusEnum"),
    "etude.core.message": ("OpenAIMessage",),
    "etude.core.sample": ("Pair", "Sample", "Turn"),
    "etude.core.skipped": ("DryRun", "Frozen", "Skipped"),
    "etude.core.trajectory": (
        "DPOItem",
        "EpisodeItem",
        "EpisodeItemRole",
        "Trajectory",
        "TrajectoryCollection",
    ),
    "etude.groups.openai_group": ("OpenAiSharedModelGroup",),
    "etude.groups.shared": ("SharedModelGroup",),
    "etude.inference.engine": ("Engine",),
    "etude.rewards.evaluator": ("Evaluator",),
    "etude.rewards.function_evaluator": ("evaluator",),
    "etude.rollout.blocking": ("SyncEpisode",),
    "etude.rollout.episode": ("Episode", "Reply"),
    "etude.rollout.reply": ("ToolCall",),
    "etude.rollout.workflow": ("function", "workflow"),
    "etude.loop.trainer": ("Trainer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "BackendError",
    "Builder",
    "Capabilities",
    "ChatRequest",
    "Completion",
    "Config",
    "ConfigError",
    "CurriculumLearningConfig",
    "DPOItem",
    "DatasetConfig",
    "Distillation",
    "Dpo",
    "DryRun",
    "Engine",
    "Episode",
    "EpisodeItem",
    "EpisodeItemRole",
    "EtudeError",
    "EvalInput",
    "EvalInputItem",
    "EvalOutput",
    "EvalOutputItem",
    "EvaluationRunOutput",
    "Evaluator",
    "EvaluatorConfig",
    "Example",
    "ExpertIteration",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "Frozen",
    "Grpo",
    "JobNameTakenError",
    "LanguageModelClient",
    "LanguageModelClientError",
    "LlmConfig",
    "Malt",
    "ModelVersion",
    "OfGradient",
    "OpenAIMessage",
    "OpenAiSharedModelGroup",
    "Pair",
    "ReinforcePP",
    "Reply",
    "RequestError",
    "RewardFunctionConfig",
    "Rloo",
    "Sample",
    "SharedModelGroup",
    "Skipped",
    "Supervised",
    "SyncEpisode",
    "TargetConfig",
    "ToolCall",
    "Trainer",
    "TrainerAdapter",
    "TrainerAdapterConfig",
    "TrainerConfig",
    "TrainingJobNotFoundClientError",
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
    "evaluator",
    "function",
    "load_config",
    "parse_config",
    "register_dataset",
    "register_evaluator",
    "register_llm",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
    "register_workflow",
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
