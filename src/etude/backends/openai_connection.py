"""The model that a hosted backend trains, and the client of its API."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from etude.backends.openai_config import JobsConfig
from etude.core.errors import CapabilityError, RequestError
from etude.inference.openai_config import OpenAiLlmConfig

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from etude.config.builder import Builder

_NO_KEY = "none"
"""The SDK wants a key also for servers that want none."""

_RUN_KEY = "run/key"
"""The journal's step that keeps it."""


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
    """What tells the run from others that are called alike; None where there is no run."""

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
    given = config.api_key or (llm.api_key if url == llm.address else None)
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
