"""OpenAI's fine-tuning API: how its jobs are made and followed, the client for it, and its errors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SecretStr, field_validator

from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.errors import BackendError, CapabilityError, RequestError, TrainingError
from etude.inference.openai_config import OpenAiLlmConfig, plain_address

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI

    from etude.config.builder import Builder

_NO_KEY = "none"
"""The SDK wants a key also for servers that want none."""
_RUN_KEY = "run/key"
"""The journal's step that keeps it."""


class JobsConfig(TrainerAdapterConfig):
    """How jobs are made and followed, wherever the API is."""

    base_url: str | None = None
    """Address of the API, ending in `/v1`. Left out: that of the model that is trained."""
    api_key: SecretStr | None = None
    """Left out: the model's own key where the address is the model's, else `OPENAI_API_KEY`."""
    n_epochs: int | Literal["auto"] = "auto"
    """Times that a job goes over its data."""
    batch_size: int | Literal["auto"] = "auto"
    """Rows per step."""
    learning_rate_multiplier: float | Literal["auto"] = "auto"
    """Factor of the default."""
    beta: float | Literal["auto"] = "auto"
    """How hard preferences pull away from the reference, in DPO."""
    min_rows: int = Field(default=1, ge=1)
    """Fewer rows are not worth a job."""
    daily_limit_wait: Annotated[float, CHANGEABLE] = Field(default=3600.0, gt=0)
    """Seconds until the next try when the day's jobs are used up."""
    daily_limit_tries: Annotated[int, CHANGEABLE] = Field(default=25, ge=1)
    """Tries before that is an error."""
    max_poll_interval: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Longest pause in seconds between two looks at a job; they grow from the trainer's `poll_interval`."""
    outage_limit: Annotated[float, CHANGEABLE] = Field(default=1800.0, ge=0)
    """Seconds without an answer after which a run gives up waiting for a job. The job goes on, and a resumed
    run finds it."""
    request_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds for one request."""
    max_retries: Annotated[int, CHANGEABLE] = Field(default=4, ge=0)
    """More attempts of a request that failed."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        return None if value is None else plain_address(value)


class TrainingJobNotFoundClientError(TrainingError):
    """There is no such job: none was created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        reason = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {reason}")
        self.job_id = job_id


@contextmanager
def api_errors(client: AsyncOpenAI) -> Iterator[None]:
    """Raise a BackendError that names the address, and never the key, for what the SDK raises."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        where = str(client.base_url).rstrip("/")
        said = f"{type(error).__name__}: {error.message}".replace(client.api_key or _NO_KEY, "***")
        raise BackendError(
            f"the fine-tuning API at {where}: {said}", temporary=is_temporary(error)
        ) from error


def is_temporary(error: APIError) -> bool:
    """Whether the same request may do later: there was no answer, too many requests, or a server error."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


def trained_model(builder: Builder, backend: str) -> OpenAiLlmConfig:
    """The config of the target model. Raises CapabilityError when it is not behind an OpenAI-style API."""
    target = builder.config.finetuning.target_model
    if target is None:
        raise RequestError("'finetuning.target_model' is missing: name the entry of `llms` to train")
    llm = builder.config.llms[target]
    if not isinstance(llm, OpenAiLlmConfig):
        raise CapabilityError(
            f"the trainer adapter '{backend}' trains models of `_type: openai`, and llms.{target} is "
            f"`_type: {llm.type_name}`; make it openai, or choose an adapter for its backend"
        )
    return llm


async def run_key(builder: Builder) -> str | None:
    """A key that tells the run from others of the same name; None where there is no run."""

    async def drawn() -> str:
        return secrets.token_hex(8)

    return None if builder.run is None else str(await builder.run.journal.step(_RUN_KEY, drawn))


def connect(config: JobsConfig, llm: OpenAiLlmConfig, *, needs_key: bool) -> AsyncOpenAI:
    """The SDK's client for the config's address and key; nothing is sent yet.

    What the config leaves out is the model's. A model's key goes to the model's address only. Raises
    RequestError when there is no key and one is needed.
    """
    from openai import AsyncOpenAI

    url = config.base_url or llm.address
    given = config.api_key or (llm.keys[0] if url == llm.address else None)
    key = given.get_secret_value().strip() if given is not None else ""
    if not key and (needs_key or url == llm.address):
        key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key and needs_key:
        raise RequestError(
            f"the trainer adapter has no key for {url}: set OPENAI_API_KEY, or `api_key` of the adapter"
        )
    return AsyncOpenAI(
        api_key=key or _NO_KEY,
        base_url=url,
        timeout=config.request_timeout,
        max_retries=config.max_retries,
    )
