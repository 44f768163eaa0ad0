"""OpenAI's fine-tuning API: the client for it, its errors as those of a run, and making a job once."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from etude.backends.job_log import JobLog
from etude.backends.openai_config import JobsConfig
from etude.core.errors import BackendError, CapabilityError, RequestError, TrainingError
from etude.inference.openai_config import OpenAiLlmConfig

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

    from etude.config.builder import Builder


_NO_KEY = "none"
"""The SDK wants a key also for servers that want none."""
_RUN_KEY = "run/key"
"""The journal's step that keeps it."""
_DAILY_LIMIT = "daily_rate_limit_exceeded"
_MAX_SUFFIX = 64
_WAIT, _MAX_WAIT = 0.5, 30.0
_IDEMPOTENCY_HEADER = "Idempotency-Key"


class TrainingJobNotFoundClientError(TrainingError):
    """There is no such job: none was created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        reason = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {reason}")
        self.job_id = job_id


@contextmanager
def api_errors(where: str, key: str) -> Iterator[None]:
    """Raise a BackendError that names `where`, and never has `key` in it, for what the SDK raises."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        said = f"{type(error).__name__}: {error.message}"
        said = said.replace(key, "***") if key else said
        raise BackendError(
            f"the fine-tuning API at {where}: {said}", temporary=is_temporary(error)
        ) from error


def is_temporary(error: APIError) -> bool:
    """Whether the same request may do later: there was no answer, too many requests, or a server error."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


def error_repr(job: FineTuningJob) -> str | None:
    """`Code: c. Message: m. Parameter: p.` of a job that failed; None of others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    text = f"Code: {error.code}. Message: {error.message}."
    return f"{text} Parameter: {error.param}." if error.param else text


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


async def create_once(
    client: AsyncOpenAI,
    name: str,
    key: str,
    request: Mapping[str, Any],
    config: JobsConfig,
    find: Callable[[str], Awaitable[FineTuningJob | None]],
    log: JobLog,
) -> FineTuningJob:
    """Make the job `name`, unless an attempt whose answer was lost has made it. `key` is its own alone.

    The SDK's own retries would make a second job when only the answer got lost, so they are off, and
    `find` looks for the job before each new attempt. When the day's jobs are used up it waits, in a way
    that a resumed run can go on with. Raises TrainingError when they stay used up, and what the SDK
    raises for a request that is refused.
    """
    from openai import APIError, RateLimitError

    once = client.with_options(max_retries=0)
    failed = limited = 0
    while True:
        try:
            return await once.fine_tuning.jobs.create(
                **request, suffix=suffix_of(name), extra_headers={_IDEMPOTENCY_HEADER: key}
            )
        except APIError as error:
            if isinstance(error, RateLimitError) and error.code == _DAILY_LIMIT:
                limited += 1
                if limited >= config.daily_limit_tries:
                    raise _used_up(name, limited) from error
                wait = config.daily_limit_wait
                log.add(name, {"event": "waiting", "reason": error.message, "seconds": wait})
            else:
                failed += 1
                if not is_temporary(error) or failed > config.max_retries:
                    raise
                wait = min(_WAIT * 2 ** (failed - 1), _MAX_WAIT)
        await asyncio.sleep(wait)
        made = await find(name)
        if made is not None:
            return made


def suffix_of(name: str) -> str:
    """A job's name as the API takes it for a part of the model's name: the end of it, where it differs."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[-_MAX_SUFFIX:].lstrip("-_") or "etude"


def _used_up(name: str, tries: int) -> TrainingError:
    return TrainingError(
        f"job {name}: the day's fine-tuning jobs were used up at all {tries} tries. "
        "Nothing that was collected is lost; resume (`etude resume`), or make the job again later."
    )


def metrics_of(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """The numbers that the latest of the events tells; the events are oldest first."""
    for event in reversed(events):
        if isinstance(event.data, Mapping) and event.type == "metrics":
            return {
                str(key): value
                for key, value in event.data.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
    return {}


def progress_of(metrics: Mapping[str, float]) -> float | None:
    """Percent done, where the events say `step` and `total_steps`."""
    step, total = metrics.get("step"), metrics.get("total_steps")
    return min(100.0, 100.0 * step / total) if step is not None and total else None
