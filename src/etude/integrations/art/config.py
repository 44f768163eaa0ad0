"""The config for training on an OpenPipe ART server: `_type: openpipe_art`."""

from typing import Any, Self

from pydantic import BaseModel, Field, SecretStr, model_validator

from etude.config.finetuning import TrainerAdapterConfig
from etude.engines.openai_compatible import PlainAddress


class ArtBackendConfig(BaseModel, extra="forbid"):
    """The address of the ART server, and its settings for the model."""

    base_url: PlainAddress | None = None
    """The address of the training server. Replaces `ip` and `port`."""
    ip: str | None = Field(default=None, min_length=1)
    """The host of the training server."""
    port: int = Field(default=7999, ge=1, le=65535)
    """The port of the training server, with `ip`."""
    name: str = Field(default="trainer_run", min_length=1)
    """The name of the trained model at the server."""
    project: str = Field(default="trainer_project", min_length=1)
    """The project of the model at the server."""
    base_model: str = Field(default="Qwen/Qwen2.5-7B-Instruct", min_length=1)
    """The model that training starts from."""
    api_key: SecretStr = SecretStr("default")
    """The key for the training server. The inference endpoint gets it too if the model's entry in `llms` has
    none."""
    init_args: dict[str, Any] | None = None
    """ART's `InitArgs`: options for loading the model at the server."""
    engine_args: dict[str, Any] | None = None
    """ART's `EngineArgs`: vLLM's arguments."""
    server_config: dict[str, Any] | None = None
    """ART's `OpenAIServerConfig`, for the inference endpoint."""

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if (self.base_url is None) == (self.ip is None):
            raise ValueError("give either `base_url`, or `ip` and `port`")
        return self

    @property
    def url(self) -> str:
        """The address of the training server, without a trailing slash."""
        return self.base_url or f"http://{self.ip}:{self.port}"


class ArtTrainingConfig(BaseModel, extra="forbid"):
    """Options of a job. The server's values apply to all other options."""

    learning_rate: float = Field(default=5e-6, gt=0)
    """The learning rate of the server's optimiser."""
    beta: float = Field(default=0.0, ge=0)
    """The weight in the loss of the KL divergence to the base model."""
    dev_config: dict[str, Any] = Field(default_factory=dict)
    """Options of ART's `dev.TrainConfig`, sent unchanged, such as `{epsilon: 0.2, ppo: true}`."""
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """More of ART's `TrainerArgs`, sent to the server with the model."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art"):
    """Train on an OpenPipe ART server (`art run`, releases 0.4.11 to 0.5.17), over HTTP."""

    backend: ArtBackendConfig
    """The server and the model."""
    training: ArtTrainingConfig = Field(default_factory=ArtTrainingConfig)
    """Options of the jobs."""
