"""Small models and an agent for the tests of this room. The models have names that Etude ships."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, SecretStr

from etude.config.component import LlmConfig, LlmRef, WorkflowConfig
from etude.config.registry import register_llm, register_workflow


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


class AgentConfig(WorkflowConfig, name="my_agent_workflow"):
    """An agent that is a component."""

    llm: LlmRef


def register_parts() -> None:
    """Register all of the above; each yields its config."""

    async def build(config, builder):
        yield config

    for llm in (LocalConfig, RemoteConfig):
        register_llm(config_type=llm)(build)
    register_workflow(config_type=AgentConfig)(build)
