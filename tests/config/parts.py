"""Small components for the tests of this room, under the names that Etude ships."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, SecretStr

from etude.config.component import DatasetConfig, EvaluatorConfig, LlmConfig, WorkflowConfig
from etude.config.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from etude.config.references import LlmRef, ReferenceTo
from etude.config.registry import (
    register_dataset,
    register_evaluator,
    register_llm,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)


class LocalConfig(LlmConfig, name="local"):
    """A model in this process."""

    model: str | Path = Field(default="tiny", description="A folder, or a name on the hub.")


class Pool(BaseModel):
    """Connections."""

    size: int = Field(default=4, ge=1, description="How many.")
    idle: float = Field(default=5.0, ge=0, description="Seconds that one is kept.")


class RemoteConfig(LlmConfig, name="openai"):
    """A model behind an endpoint."""

    model_name: str = Field(description="The endpoint's name for the model.")
    base_url: str = Field(default="http://localhost:8000/v1", description="Where it listens.")
    api_key: SecretStr | None = Field(default=None, description="Sent with each request.")
    temperature: float = Field(default=1.0, ge=0, le=2, description="How boldly to sample.")
    headers: dict[str, str] = Field(default_factory=dict, description="Sent with each request.")
    pool: Pool = Field(default_factory=Pool, description="Connections.")


class FunctionConfig(WorkflowConfig, name="function"):
    """A Python function."""

    function: str
    timeout: float | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class AgentConfig(WorkflowConfig, name="my_agent_workflow"):
    """An agent that is a component."""

    llm: LlmRef


class FunctionEvaluatorConfig(EvaluatorConfig, name="function"):
    """A Python function."""

    function: str


class WeightedConfig(EvaluatorConfig, name="weighted"):
    """A weighted mean of others."""

    weights: Annotated[dict[str, float], ReferenceTo("evaluators")]


class FileConfig(DatasetConfig):
    """A file of examples."""

    file_path: Path
    id_key: str = "id"
    limit: int | None = Field(default=None, ge=1)


class JsonConfig(FileConfig, name="json"):
    """One JSON array."""


class JsonLinesConfig(FileConfig, name="jsonl"):
    """A JSON object per line."""


class PythonConfig(DatasetConfig, name="python"):
    """A Python function."""

    function: str


class GrpoConfig(TrajectoryBuilderConfig, name="grpo"):
    """Groups of episodes."""

    num_generations: int = Field(default=8, ge=1)


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Training in this process."""

    learning_rate: float = Field(default=1e-4, gt=0)


class EpochsConfig(TrainerConfig, name="epochs"):
    """The plain loop."""


def register_parts() -> None:
    """Register all of the above; each yields a (config, builder) pair."""

    async def pair(config, builder):
        yield config, builder

    for llm in (LocalConfig, RemoteConfig):
        register_llm(config_type=llm)(pair)
    for workflow in (FunctionConfig, AgentConfig):
        register_workflow(config_type=workflow)(pair)
    for evaluator in (FunctionEvaluatorConfig, WeightedConfig):
        register_evaluator(config_type=evaluator)(pair)
    for dataset in (JsonConfig, JsonLinesConfig, PythonConfig):
        register_dataset(config_type=dataset)(pair)
    register_trajectory_builder(config_type=GrpoConfig)(pair)
    register_trainer_adapter(config_type=LocalAdapterConfig)(pair)
    register_trainer(config_type=EpochsConfig)(pair)
