"""OpenAI's fine-tuning API: how its jobs are made and followed, the client for it, and its errors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr

from etude.algorithms.algorithm import kind_of
from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.edge import TrajectoryCollection, message_of, trajectory_of, units_of
from etude.core.errors import BackendError, CapabilityError, RequestError, TrainingError
from etude.core.job import ModelVersion, TrainingStatusEnum
from etude.core.json_text import JsonError, read_json
from etude.core.keys import content_hash
from etude.core.message import Message, OpenAIMessage, Tool
from etude.core.sample import Sample
from etude.core.secrets import keep_secret
from etude.core.training_rows import GrpoRow
from etude.core.trajectory import DPOItem, EpisodeItem, Trajectory
from etude.inference.openai_config import OpenAiLlmConfig, PlainAddress
from etude.wire.retries import (
    USUAL,
    Again,
    RetryPolicy,
    is_worth_retrying,
    reason_of,
    retry_after,
)

if TYPE_CHECKING:
    import httpx
    from openai import APIError, AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

    from etude.config.builder import Builder

DAILY_LIMIT = "daily_rate_limit_exceeded"
_USED_UP = (DAILY_LIMIT, "insufficient_quota")
"""Codes of 429 that are no matter of seconds."""
_NO_KEY = "none"
"""The SDK wants a key also for servers that want none."""
_LISTS = ("files", "jobs", "events")
"""Ends of the paths at which a GET has a list."""
_RUN_KEY = "run/key"
"""The journal's step that keeps it."""


class JobsConfig(TrainerAdapterConfig):
    """How jobs are made and followed, wherever the API is."""

    base_url: PlainAddress | None = None
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
    request_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds for one request, and one more for each 32 KB that it sends."""
    max_retries: Annotated[int, CHANGEABLE] = Field(default=USUAL.retries, ge=0)
    """More attempts of a request that failed. Nothing is made twice: files and jobs are looked for first."""
    retry_wait: Annotated[float, CHANGEABLE] = Field(default=USUAL.first_wait, ge=0)
    """Longest wait in seconds before the first of them; doubles with each. `Retry-After` goes first."""

    @property
    def retry_policy(self) -> RetryPolicy:
        """How requests are made again."""
        return replace(USUAL, retries=self.max_retries, first_wait=self.retry_wait)


class TrainingJobNotFoundClientError(TrainingError):
    """There is no such job: none was created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        reason = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {reason}")
        self.job_id = job_id


@contextmanager
def api_errors(client: AsyncOpenAI) -> Iterator[None]:
    """Raise a BackendError that names the address, and never the key, for what the SDK raises."""
    import httpx
    from openai import APIError

    try:
        yield
    except APIError as error:
        where, cause = str(client.base_url).rstrip("/"), error.__cause__
        why = f" ({reason_of(cause)})" if isinstance(cause, httpx.RequestError) else ""
        problem = f"{type(error).__name__}: {error.message}{why}".replace(client.api_key or _NO_KEY, "***")
        raise BackendError(
            f"the fine-tuning API at {where}: {problem}", temporary=is_temporary(error)
        ) from error


def is_temporary(error: APIError) -> bool:
    """Whether the same request may do later: there was no answer, too many requests, or a server error."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return is_worth_retrying(error.status_code)
    return isinstance(error, APIConnectionError)


def again(error: Exception) -> Again | None:
    """Why a request of the SDK's is worth another attempt; None where it is not."""
    from openai import APIError, APIStatusError, APITimeoutError

    from etude.wire.http_answers import MalformedAnswer

    if not isinstance(error, APIError) or not is_temporary(error) or error.code in _USED_UP:
        return None
    if isinstance(error, APIStatusError):
        return Again(f"http_{error.status_code}", retry_after(error.response.headers))
    if isinstance(error.__cause__, MalformedAnswer):
        return Again("malformed")
    return Again("timeout" if isinstance(error, APITimeoutError) else "connection")


def problem_of(answer: httpx.Response) -> str | None:
    """Why a good answer cannot be the API's: an object with an id, a list of such, or the content of a file.

    The SDK takes whatever comes for what it asked for: a list that is none would have no jobs in it, and a
    job be made a second time.
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

    from etude.wire.http_answers import UNCOMPRESSED, WholeAnswers, limit_answer

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
    # Version 3 of the SDK is annotated with httpx2, and takes a client of httpx all the same.
    http: Any = WholeAnswers(
        seconds=config.request_timeout,
        problem_of=problem_of,
        follow_redirects=True,
        headers=UNCOMPRESSED,
        event_hooks={"response": [limit_answer]},
    )
    return AsyncOpenAI(
        api_key=key or _NO_KEY,
        base_url=url,
        timeout=config.request_timeout,
        max_retries=0,  # They follow the policy of all clients.
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


def hosted_version(number: int, job_id: str, model: str) -> ModelVersion:
    """The version that is a model at an API, made by the job."""
    # The API gives no hash of the weights; the job and the model's name stand for them.
    return ModelVersion(number=number, location=model, digest=content_hash([job_id, model]))


def error_of(job: FineTuningJob) -> str | None:
    """`Code: c. Message: m. Parameter: p.` of a job that failed; None of others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    text = f"Code: {error.code}. Message: {error.message}."
    return f"{text} Parameter: {error.param}." if error.param else text


def metrics_of(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """The numbers in the latest of the events; the events are oldest first."""
    for event in reversed(events):
        if isinstance(event.data, Mapping) and event.type == "metrics":
            numbers = {str(key): value for key, value in event.data.items()}
            return {key: value for key, value in numbers.items() if type(value) in (int, float)}
    return {}


def rows_of(collection: TrajectoryCollection) -> Iterator[dict[str, Any]]:
    """One row for each trajectory to imitate, for each preference, or for each group of GRPO.

    A group's has the token ids and logprobs of what was sampled: `{"trajectories": […]}`.

    Raises CapabilityError for data that there are no rows for, TrainingError for malformed data.
    """
    kind = kind_of(collection.method)
    for group in collection.groups:
        if kind == "samples" and group:
            units = chain.from_iterable(units_of(unit, kind) for unit in group)
            row = GrpoRow.of_group([unit for unit in units if isinstance(unit, Sample)])
            yield row.model_dump(mode="json", exclude_none=True)
        for trajectory in map(trajectory_of, group) if kind != "samples" else ():
            if kind == "imitation":
                yield supervised_row(trajectory)
            else:
                yield from (dpo_row(item, trajectory.tools) for item in trajectory.episode)


def supervised_row(trajectory: Trajectory) -> dict[str, Any]:
    """`{"messages": […]}`; what the agent wrote for the assistant itself has the weight 0."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    row: dict[str, Any] = {"messages": [message_of(item) for item in items]}
    return row | {"tools": trajectory.tools} if trajectory.tools else row


def dpo_row(item: Any, tools: Sequence[Tool] | None = None) -> dict[str, Any]:
    """`{"input": …, "preferred_output": […], "non_preferred_output": […]}`. Raises as `rows_of`."""
    if not isinstance(item, DPOItem):
        raise TrainingError("DPO trains on preferences (DPOItem), and found an episode; use builder dpo")
    chosen, rejected = item.chosen_message, item.rejected_message
    if item.turns > 1 and (chosen is None or rejected is None):
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


def _reply(message: OpenAIMessage | None, text: str) -> Message:
    return {"role": "assistant", "content": text} if message is None else message.to_wire()
