"""Training on an OpenPipe ART server: `_type: openpipe_art`. Importing this module only registers it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, SecretStr, model_validator

from etude.config.finetuning import TrainerAdapterConfig
from etude.config.registry import register_trainer_adapter
from etude.core.errors import CapabilityError
from etude.engines.openai_config import PlainAddress

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.art.adapter import ARTTrainerAdapter


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
    def _one_address(self) -> ArtBackendConfig:
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


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def openpipe_art(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    """Build the adapter for the run's target model.

    Raises CapabilityError if the model's endpoint or the trajectory builder does not suit ART: ART needs
    token ids and logprobs, and one reward for a whole trajectory.
    """
    from etude.backends.openai_api import trained_model
    from etude.integrations.art.adapter import ARTTrainerAdapter
    from etude.integrations.art.client import ArtInference

    llm, target = trained_model(builder, "openpipe_art"), str(builder.config.finetuning.target_model)
    if llm.base_url is None:
        raise CapabilityError(
            f"llms.{target} has no 'base_url', and would be sampled from OpenAI; give it the address where "
            "the ART server serves the model (http://HOST:8000/v1, where nothing else is set)"
        )
    if not llm.asks_for_logprobs or not llm.asks_for_token_ids:
        raise CapabilityError(
            f"ART trains on sampled tokens and their logprobs, and llms.{target} does not ask for them; set "
            "'provider: vllm' there, which is what an ART server samples with"
        )
    name = builder.config.finetuning.trajectory_builder
    if getattr(builder.config.trajectory_builders.get(name or ""), "credit", None) == "turn":
        raise CapabilityError(
            f"trajectory_builders.{name} has 'credit: turn', which gives each answer a reward of its own, "
            "and ART takes one for a whole trajectory; use 'credit: agent' or 'episode'"
        )
    key = llm.api_key or config.backend.api_key
    inference = ArtInference(llm.address, key.get_secret_value())
    log = None if builder.run is None else builder.run.path / "openpipe_art_jobs.jsonl"
    engine = await builder.get_llm(target)
    adapter = ARTTrainerAdapter(
        config, engine=engine, inference=inference, folder=builder.checkpoints, log=log
    )
    try:
        yield adapter
    finally:
        await adapter.cleanup()
