"""Making a fine-tuning job once, whatever the network and the day's limits do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from etude.backends.job_log import JobLog
from etude.backends.openai_config import JobsConfig
from etude.backends.openai_errors import is_temporary
from etude.core.errors import TrainingError

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob

_DAILY_LIMIT = "daily_rate_limit_exceeded"
_MAX_SUFFIX = 64
_WAIT, _MAX_WAIT = 0.5, 30.0
_IDEMPOTENCY_HEADER = "Idempotency-Key"


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
