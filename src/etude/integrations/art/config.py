"""The config of training on an OpenPipe ART server: `_type: openpipe_art`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, SecretStr, model_validator

from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.inference.openai_config import PlainAddress
from etude.wire.retries import USUAL, RetryPolicy


class ArtBackendConfig(BaseModel, extra="forbid"):
    """Where the ART server is, and what it calls the model."""

    base_url: PlainAddress | None = None
    """Address of the training server, in place of `ip` and `port`."""
    ip: str | None = Field(default=None, min_length=1)
    """Host of the training server."""
    port: int = Field(default=7999, ge=1, le=65535)
    """Port of the training server, with `ip`."""
    name: str = Field(default="trainer_run", min_length=1)
    """The server's name for the trained model."""
    project: str = Field(default="trainer_project", min_length=1)
    """The project it belongs to."""
    base_model: str = Field(default="Qwen/Qwen2.5-7B-Instruct", min_length=1)
    """The model that training starts from."""
    api_key: SecretStr = SecretStr("default")
    """Sent to the training server; also to the inference endpoint where the model's entry in `llms` has
    no key."""
    delete_old_checkpoints: bool = False
    """Delete checkpoints on the server that the trainer does not keep (`keep_checkpoints`)."""
    init_args: dict[str, Any] | None = None
    """ART's `InitArgs`: how the server loads the model."""
    engine_args: dict[str, Any] | None = None
    """ART's `EngineArgs`: vLLM's arguments."""
    server_config: dict[str, Any] | None = None
    """ART's `OpenAIServerConfig`, for the inference endpoint."""

    @model_validator(mode="after")
    def _one_address(self) -> ArtBackendConfig:
        if (self.base_url is None) == (self.ip is None):
            raise ValueError("say where the server is: either `base_url`, or `ip` and `port`")
        return self

    @property
    def url(self) -> str:
        """The address of the training server, without a slash at its end."""
        return self.base_url or f"http://{self.ip}:{self.port}"


class ArtTrainingConfig(BaseModel, extra="forbid"):
    """Options of a job. What is left out is as the server has it."""

    learning_rate: float = Field(default=5e-6, gt=0)
    """Of the server's optimiser."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the base model in the loss."""
    dev_config: dict[str, Any] = Field(default_factory=dict)
    """ART's `dev.TrainConfig` as it stands, such as `{epsilon: 0.2, ppo: true}`."""
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    """Further `TrainerArgs` of ART, given to the server with the model."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art"):
    """Train on an OpenPipe ART server (`art run`, releases 0.4.11 to 0.5.17), over HTTP."""

    backend: ArtBackendConfig
    """The server and the model."""
    training: ArtTrainingConfig = Field(default_factory=ArtTrainingConfig)
    """Options of the jobs."""
    request_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds for a request but one that trains."""
    max_retries: Annotated[int, CHANGEABLE] = Field(default=USUAL.retries, ge=0)
    """More attempts of a request that failed; one that trains is never sent twice."""
    retry_wait: Annotated[float, CHANGEABLE] = Field(default=USUAL.first_wait, ge=0)
    """Longest wait in seconds before the first of them; doubles with each."""
    silence_timeout: Annotated[float, CHANGEABLE] = Field(default=3600.0, gt=0)
    """Seconds without a word after which a job has failed."""
    job_timeout: Annotated[float, CHANGEABLE] = Field(default=86400.0, gt=0)
    """Seconds for a whole job; then it is cancelled."""
    recover_wait: Annotated[float, CHANGEABLE] = Field(default=30.0, ge=0)
    """Seconds in which a job whose connection was lost may still turn out to be done."""

    @property
    def retry_policy(self) -> RetryPolicy:
        """How requests are made again."""
        return replace(USUAL, retries=self.max_retries, first_wait=self.retry_wait)
