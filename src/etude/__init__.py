"""Etude: fine-tune the models inside LLM agents from the agents' own runs.

Every public name can be imported from here. Its module is loaded on first use.
"""

from __future__ import annotations

# Import nothing here, not even `typing`: the command must handle Ctrl-C as early as possible.
TYPE_CHECKING = False
# Every public name with its module. Type checkers follow these imports, and `__getattr__` reads them.
if TYPE_CHECKING:
    from typing import Any

    from etude.algorithms.algorithm import Algorithm as Algorithm
    from etude.algorithms.collecting import TrajectoryBuilder as TrajectoryBuilder
    from etude.algorithms.distillation import Distillation as Distillation
    from etude.algorithms.dpo import Dpo as Dpo
    from etude.algorithms.dpo import Malt as Malt
    from etude.algorithms.grpo import Grpo as Grpo
    from etude.algorithms.grpo import ReinforcePP as ReinforcePP
    from etude.algorithms.grpo import Rloo as Rloo
    from etude.algorithms.imitation import ExpertIteration as ExpertIteration
    from etude.algorithms.imitation import Supervised as Supervised
    from etude.backends.openai_api import TrainingJobNotFoundClientError as TrainingJobNotFoundClientError
    from etude.backends.state_folders import JobNameTakenError as JobNameTakenError
    from etude.backends.trainer_adapter import Capabilities as Capabilities
    from etude.backends.trainer_adapter import TrainerAdapter as TrainerAdapter
    from etude.config.builder import Builder as Builder
    from etude.config.component import ClusterConfig as ClusterConfig
    from etude.config.component import DatasetConfig as DatasetConfig
    from etude.config.component import EvaluatorConfig as EvaluatorConfig
    from etude.config.component import LlmConfig as LlmConfig
    from etude.config.component import Supplies as Supplies
    from etude.config.component import ToolsConfig as ToolsConfig
    from etude.config.component import TrackerConfig as TrackerConfig
    from etude.config.component import WorkflowConfig as WorkflowConfig
    from etude.config.finetuning import CurriculumLearningConfig as CurriculumLearningConfig
    from etude.config.finetuning import FinetuneConfig as FinetuneConfig
    from etude.config.finetuning import FinetuneRunConfig as FinetuneRunConfig
    from etude.config.finetuning import RewardFunctionConfig as RewardFunctionConfig
    from etude.config.finetuning import TrainerAdapterConfig as TrainerAdapterConfig
    from etude.config.finetuning import TrainerConfig as TrainerConfig
    from etude.config.finetuning import TrajectoryBuilderConfig as TrajectoryBuilderConfig
    from etude.config.load import load_config as load_config
    from etude.config.registry import register_cluster as register_cluster
    from etude.config.registry import register_dataset as register_dataset
    from etude.config.registry import register_evaluator as register_evaluator
    from etude.config.registry import register_llm as register_llm
    from etude.config.registry import register_tools as register_tools
    from etude.config.registry import register_tracker as register_tracker
    from etude.config.registry import register_trainer as register_trainer
    from etude.config.registry import register_trainer_adapter as register_trainer_adapter
    from etude.config.registry import register_trajectory_builder as register_trajectory_builder
    from etude.config.registry import register_workflow as register_workflow
    from etude.config.schema import Config as Config
    from etude.core.call import ChatRequest as ChatRequest
    from etude.core.call import Completion as Completion
    from etude.core.episode import Example as Example
    from etude.core.episode import ToolResult as ToolResult
    from etude.core.errors import BudgetReached as BudgetReached
    from etude.core.errors import ConfigError as ConfigError
    from etude.core.errors import EtudeError as EtudeError
    from etude.core.errors import RequestError as RequestError
    from etude.core.evaluation import EvalInput as EvalInput
    from etude.core.evaluation import EvalInputItem as EvalInputItem
    from etude.core.evaluation import EvalOutput as EvalOutput
    from etude.core.evaluation import EvalOutputItem as EvalOutputItem
    from etude.core.evaluation import EvaluationRunOutput as EvaluationRunOutput
    from etude.core.history import EpochEntry as EpochEntry
    from etude.core.history import ValidationEntry as ValidationEntry
    from etude.core.interfaces import Engine as Engine
    from etude.core.interfaces import Evaluator as Evaluator
    from etude.core.job import ModelVersion as ModelVersion
    from etude.core.job import Skipped as Skipped
    from etude.core.job import TrainingJobRef as TrainingJobRef
    from etude.core.job import TrainingJobStatus as TrainingJobStatus
    from etude.core.job import TrainingStatusEnum as TrainingStatusEnum
    from etude.core.sample import Pair as Pair
    from etude.core.sample import Sample as Sample
    from etude.core.sample import TrajectoryCollection as TrajectoryCollection
    from etude.core.sample import Turn as Turn
    from etude.core.trajectory import DPOItem as DPOItem
    from etude.core.trajectory import EpisodeItem as EpisodeItem
    from etude.core.trajectory import EpisodeItemRole as EpisodeItemRole
    from etude.core.trajectory import Trajectory as Trajectory
    from etude.groups.shared import OpenAiSharedModelGroup as OpenAiSharedModelGroup
    from etude.groups.shared import PureTextSharedModelGroup as PureTextSharedModelGroup
    from etude.groups.shared import SharedModelGroup as SharedModelGroup
    from etude.integrations.art.adapter import ARTTrainerAdapter as ARTTrainerAdapter
    from etude.integrations.art.config import ARTTrainerAdapterConfig as ARTTrainerAdapterConfig
    from etude.loop.alarms import Alarm as Alarm
    from etude.loop.alarms import Sighting as Sighting
    from etude.loop.interface import Trainer as Trainer
    from etude.loop.trainer import EpochTrainer as EpochTrainer
    from etude.rollout.episode import Episode as Episode
    from etude.rollout.episode import SyncEpisode as SyncEpisode
    from etude.rollout.evaluator import evaluator as evaluator
    from etude.rollout.recorder import Reply as Reply
    from etude.rollout.recorder import ToolCall as ToolCall
    from etude.rollout.recorder import function as function
    from etude.rollout.workflow import workflow as workflow
    from etude.run import Run as Run
    from etude.run import TrainedModel as TrainedModel
    from etude.show.tracker import RunRecord as RunRecord
    from etude.show.tracker import TrackedRun as TrackedRun
    from etude.show.tracker import Tracker as Tracker
    from etude.verbs import EvaluationRun as EvaluationRun
    from etude.verbs import EvaluationRunConfig as EvaluationRunConfig
    from etude.verbs import evaluate as evaluate
    from etude.verbs import evaluate_async as evaluate_async
    from etude.verbs import load_run as load_run
    from etude.verbs import resume as resume
    from etude.verbs import resume_async as resume_async
    from etude.verbs import train as train
    from etude.verbs import train_async as train_async

    __version__: str

_found_homes: dict[str, str] = {}


def _homes() -> dict[str, str]:
    """Return the module of each public name, read from the imports above."""
    if _found_homes:
        return _found_homes
    import ast
    from pathlib import Path

    imports = [
        node
        for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("etude.")
    ]
    _found_homes.update({alias.name: str(node.module) for node in imports for alias in node.names})
    return _found_homes


def __getattr__(name: str) -> Any:
    import importlib

    value: Any
    if name == "__all__":
        value = sorted([*_homes(), "__version__"])
    elif name == "__version__":
        value = importlib.import_module("importlib.metadata").version(__name__)
    elif name in _homes():
        value = getattr(importlib.import_module(_homes()[name]), name)
    else:
        raise AttributeError(f"module 'etude' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes(), "__version__"})
