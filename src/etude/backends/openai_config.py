"""The configs of training behind OpenAI's fine-tuning API: what all such backends share, and OpenAI's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.inference.openai_config import plain_address


class JobsConfig(TrainerAdapterConfig):
    """How jobs are made and followed, wherever the API is."""

    base_url: str | None = Field(
        default=None,
        description="Address of the API, ending in `/v1`. Left out: that of the model that is trained.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="Left out: the model's own key where the address is the model's, else `OPENAI_API_KEY`.",
    )
    n_epochs: int | Literal["auto"] = Field(
        default="auto", description="Times that a job goes over its data."
    )
    batch_size: int | Literal["auto"] = Field(default="auto", description="Rows per step.")
    learning_rate_multiplier: float | Literal["auto"] = Field(
        default="auto", description="Factor of the default."
    )
    beta: float | Literal["auto"] = Field(
        default="auto", description="How hard preferences pull away from the reference, in DPO."
    )
    min_rows: int = Field(default=1, ge=1, description="Fewer rows are not worth a job.")
    daily_limit_wait: Annotated[float, CHANGEABLE] = Field(
        default=3600.0, gt=0, description="Seconds until the next try when the day's jobs are used up."
    )
    daily_limit_tries: Annotated[int, CHANGEABLE] = Field(
        default=25, ge=1, description="Tries before that is an error."
    )
    max_poll_interval: Annotated[float, CHANGEABLE] = Field(
        default=60.0,
        gt=0,
        description="Longest pause in seconds between two looks at a job; they grow from the trainer's "
        "`poll_interval`.",
    )
    outage_limit: Annotated[float, CHANGEABLE] = Field(
        default=1800.0,
        ge=0,
        description="Seconds without an answer after which a run gives up waiting for a job. The job goes "
        "on, and a resumed run finds it.",
    )
    request_timeout: Annotated[float, CHANGEABLE] = Field(
        default=60.0, gt=0, description="Seconds for one request."
    )
    max_retries: Annotated[int, CHANGEABLE] = Field(
        default=4, ge=0, description="More attempts of a request that failed."
    )

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        return None if value is None else plain_address(value)


class ReinforcementConfig(BaseModel):
    """OpenAI's reinforcement fine-tuning: it samples and grades by itself, on the prompts of the run."""

    model_config = ConfigDict(extra="forbid")

    grader: dict[str, Any] = Field(
        description="OpenAI's grader object. A row has `item.expected` and `item.inputs` of the example."
    )
    reasoning_effort: Literal["default", "low", "medium", "high"] = Field(
        default="default", description="How long the model thinks."
    )
    compute_multiplier: float | Literal["auto"] = Field(
        default="auto", description="Factor of the compute spent on exploring."
    )


class OpenAiAdapterConfig(JobsConfig, name="openai"):
    """Train at OpenAI, through its fine-tuning API."""

    min_rows: int = Field(default=10, ge=1, description="The API refuses training files with fewer rows.")
    usd_per_million_tokens: float | None = Field(
        default=None, ge=0, description="Price of training. Left out: as known for the model, if it is."
    )
    max_usd: float | None = Field(
        default=None, gt=0, description="Refuse a job that is estimated to cost more than this."
    )
    reinforcement: ReinforcementConfig | None = Field(
        default=None,
        description="Lets the method `grpo` become OpenAI's reinforcement fine-tuning, with its grader in "
        "place of the run's rewards.",
    )
