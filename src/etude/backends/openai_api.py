"""OpenAI's fine-tuning API: the config of its jobs, its client, its errors and its training rows."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import Field, SecretStr

from etude.algorithms.algorithm import data_kind, read_group
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.conversion import item_message
from etude.core.errors import BackendError, CapabilityError, RequestError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.core.json_text import JsonError, read_json
from etude.core.message import Message, OpenAIMessage, Tool
from etude.core.sample import Sample, TrajectoryCollection, to_trajectory
from etude.core.secrets import keep_secret
from etude.core.training_rows import GrpoRow
from etude.core.trajectory import DPOItem, EpisodeItem, Trajectory
from etude.engines.openai_compatible import OpenAiLlmConfig, PlainAddress
from etude.store.run_folder import KEY_STEP
from etude.wire.retries import RetryReason, describe, is_worth_retrying, retry_after

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

    from etude.config.builder import Builder

_USED_UP = ("daily_rate_limit_exceeded", "insufficient_quota")
"""Codes of 429 responses that a retry within seconds does not help."""
_NO_KEY = "none"
"""The SDK needs a key even for servers that need none."""
_LISTS = ("files", "jobs", "events")
"""The ends of the paths for which a GET returns a list."""
REQUEST_SECONDS = 60.0
"""Seconds for one request, plus one second for each 32 KB that it sends."""


class JobsConfig(TrainerAdapterConfig):
    """Settings for jobs at any server with OpenAI's fine-tuning API."""

    base_url: PlainAddress | None = None
    """Address of the API, ending in `/v1`. Default: the address of the trained model."""
    api_key: SecretStr | None = None
    """The API key. Default: the model's own key if the address is the model's, otherwise `OPENAI_API_KEY`."""
    hyperparameters: dict[str, float | int | str | bool] = Field(default_factory=dict)
    """Hyperparameters of jobs, under the API's names, such as `n_epochs`. The API chooses the others."""


class TrainingJobNotFoundClientError(TrainingError):
    """The job does not exist: it was not created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        reason = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {reason}")
        self.job_id = job_id


@contextmanager
def api_errors(client: AsyncOpenAI) -> Iterator[None]:
    """Turn the SDK's errors into a BackendError that names the address, and never the key."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        where, cause = str(client.base_url).rstrip("/"), error.__cause__
        why = f" ({describe(cause)})" if isinstance(cause, httpx.RequestError) else ""
        problem = f"{type(error).__name__}: {error.message}{why}".replace(client.api_key or _NO_KEY, "***")
        raise BackendError(
            f"the fine-tuning API at {where}: {problem}", temporary=is_temporary(error)
        ) from error


def is_temporary(error: APIError) -> bool:
    """Return whether a retry may help: no answer came, there were too many requests, or the server failed."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return is_worth_retrying(error.status_code)
    return isinstance(error, APIConnectionError)


def retry_reason(error: Exception) -> RetryReason | None:
    """Return why an SDK request should be retried, or None if it should not."""
    from openai import APIError, APIStatusError, APITimeoutError

    if not isinstance(error, APIError) or not is_temporary(error) or error.code in _USED_UP:
        return None
    if isinstance(error, APIStatusError):
        return RetryReason(f"http_{error.status_code}", retry_after(error.response.headers))
    if isinstance(error.__cause__, httpx.DecodingError):
        return RetryReason("malformed")
    return RetryReason("timeout" if isinstance(error, APITimeoutError) else "connection")


def response_problem(answer: httpx.Response) -> str | None:
    """Return why a successful response cannot be the API's, or None if it can.

    A valid response is an object with an id, a list of such objects, or a file's content. The SDK accepts any
    response. A malformed list would seem to contain no jobs, and a job would be created twice.
    """
    request = answer.request
    if request.method == "GET" and request.url.path.endswith("/content"):
        return None
    try:
        body = read_json(answer.content)
    except JsonError:
        return f"malformed JSON, of {len(answer.content)} bytes"
    resources: Any = [body]
    if request.method == "GET" and request.url.path.rsplit("/", 1)[-1] in _LISTS:
        resources = body.get("data") if isinstance(body, dict) else None
        if not isinstance(resources, list):
            return "an answer without a list under `data`"
    if not all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in resources):
        return "an answer without an `id`"
    return None


async def run_key(builder: Builder) -> str | None:
    """Return a key that distinguishes the run from others of the same name, or None without a run."""

    async def draw() -> str:
        return secrets.token_hex(8)

    return None if builder.run is None else str(await builder.run.journal.step(KEY_STEP, draw))


def connect(config: JobsConfig, llm: OpenAiLlmConfig, *, needs_key: bool) -> AsyncOpenAI:
    """Return the SDK's client for the config's address and key. Nothing is sent yet.

    The model's config fills missing values. A model's key is sent to the model's address only. Raises
    RequestError if a needed key is missing.
    """
    from openai import AsyncOpenAI

    from etude.engines.http_client import UNCOMPRESSED, WholeAnswers, limit_answer

    url = config.base_url or llm.address
    given = config.api_key or (llm.api_key if url == llm.address else None)
    key = given.get_secret_value().strip() if given is not None else ""
    if not key and (needs_key or url == llm.address):
        key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key and needs_key:
        raise RequestError(
            f"the trainer adapter has no key for {url}: set OPENAI_API_KEY, or `api_key` of the adapter"
        )
    keep_secret(key)
    # Version 3 of the SDK is annotated with httpx2 but also accepts a client of httpx.
    http: Any = WholeAnswers(
        seconds=REQUEST_SECONDS,
        find_problem=response_problem,
        follow_redirects=True,
        headers=UNCOMPRESSED,
        event_hooks={"response": [limit_answer]},
    )
    return AsyncOpenAI(
        api_key=key or _NO_KEY,
        base_url=url,
        timeout=REQUEST_SECONDS,
        max_retries=0,  # Retries follow the policy of all clients.
        http_client=http,
    )


STATES = {
    "validating_files": TrainingStatusEnum.PENDING,
    "queued": TrainingStatusEnum.PENDING,
    "paused": TrainingStatusEnum.PENDING,
    "running": TrainingStatusEnum.RUNNING,
    "succeeded": TrainingStatusEnum.COMPLETED,
    "failed": TrainingStatusEnum.FAILED,
    "cancelled": TrainingStatusEnum.CANCELED,
}


def job_error(job: FineTuningJob) -> str | None:
    """Return `Code: c. Message: m. Parameter: p.` for a failed job, and None for others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    text = f"Code: {error.code}. Message: {error.message}."
    return f"{text} Parameter: {error.param}." if error.param else text


def latest_metrics(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """Return the numbers in the latest metrics event. The events are ordered newest first."""
    for event in events:
        if isinstance(event.data, Mapping) and event.type == "metrics":
            numbers = {str(key): value for key, value in event.data.items()}
            return {key: value for key, value in numbers.items() if type(value) in (int, float)}
    return {}


def training_file(collection: TrajectoryCollection) -> bytes:
    """Return the training file of a job, with one line per row. Raises as `rows_for_api`."""
    rows = rows_for_api(collection)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def rows_for_api(collection: TrajectoryCollection) -> Iterator[dict[str, Any]]:
    """Yield one row per trajectory to imitate, per preference, or per group of GRPO.

    A group's row `{"trajectories": […]}` has the sampled token ids and their logprobs.

    Raises CapabilityError if the data have no row format, TrainingError if they are malformed.
    """
    kind = data_kind(collection.method)
    for group in collection.groups:
        if kind == "samples" and group:
            row = GrpoRow.from_group([unit for unit in read_group(group, kind) if isinstance(unit, Sample)])
            yield row.model_dump(mode="json", exclude_none=True)
        for trajectory in map(to_trajectory, group) if kind != "samples" else ():
            if kind == "imitation":
                yield supervised_row(trajectory)
            else:
                yield from (dpo_row(item, trajectory.tools) for item in trajectory.episode)


def supervised_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return `{"messages": […]}`. Assistant messages that the agent itself wrote have weight 0."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    row: dict[str, Any] = {"messages": [item_message(item) for item in items]}
    return row | {"tools": trajectory.tools} if trajectory.tools else row


def dpo_row(item: Any, tools: Sequence[Tool] | None = None) -> dict[str, Any]:
    """Return `{"input", "preferred_output", "non_preferred_output"}`. Raises as `rows_for_api`."""
    if not isinstance(item, DPOItem):
        raise TrainingError("DPO trains on preferences (DPOItem), and found an episode; use builder dpo")
    chosen, rejected = (messages or [] for messages in (item.chosen_messages, item.rejected_messages))
    lengths = (len(chosen), len(rejected))  # Either side may have more turns.
    if max(lengths) > 1 or (item.turns > 1 and lengths != (1, 1)):
        raise CapabilityError(
            "DPO over the fine-tuning API compares two answers to one prompt, and a pair has several turns; "
            "set 'compare: turns' in the builder 'dpo', or use 'malt'"
        )
    return {
        "input": {"messages": item.prompt_messages}
        | ({"tools": list(tools), "parallel_tool_calls": True} if tools else {}),
        "preferred_output": [_reply(chosen, item.chosen_response)],
        "non_preferred_output": [_reply(rejected, item.rejected_response)],
    }


def _reply(messages: Sequence[OpenAIMessage], text: str) -> Message:
    return messages[0].to_wire() if len(messages) == 1 else {"role": "assistant", "content": text}
