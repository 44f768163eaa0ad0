"""OpenPipe ART's HTTP protocol (`art run`, releases 0.4.11 to 0.5.17): its JSON, and clients.

ART's releases after 0.4.11 have no client for this protocol, so Etude has its own. The shapes match
`art.trajectories`. Each release ignores the fields that only the other has. A message that the model sampled
is an OpenAI `Choice` with logprobs, and ART trains on it. Every other message is a plain dict.
"""

import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, FiniteFloat, PrivateAttr, TypeAdapter, ValidationError

from etude.backends.state_folders import JobContent
from etude.core.errors import CapabilityError, StoreError, TrainingError
from etude.core.job import ModelVersion, TrainingStatusEnum
from etude.core.message import Tool
from etude.core.sample import TrajectoryCollection
from etude.core.secrets import keep_secret
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.engines.http_client import UNCOMPRESSED, limit_answer
from etude.integrations.art.config import ARTTrainerAdapterConfig
from etude.store.files import write_atomically
from etude.wire.retries import Retryable, RetryReason, describe, to_failure, with_retries

T = TypeVar("T")
Json = dict[str, Any]

FLAT = "group without differing rewards"


@dataclass(frozen=True, slots=True)
class ArtGroups:
    """The groups of a job, and counts of the trajectories that were left out."""

    groups: list[Json]
    rejected: dict[str, int] = field(default_factory=dict)
    """The number of trajectories that were left out, by reason."""


class ArtModel(BaseModel):
    """ART's `TrainableModel`. ART has defaults for its other fields."""

    name: str
    project: str
    trainable: bool = True
    base_model: str
    internal_config: Json = Field(serialization_alias="_internal_config")
    """ART's `InternalModelConfig`."""

    @classmethod
    def from_config(cls, config: ARTTrainerAdapterConfig) -> Self:
        """Describe the model that a config trains."""
        backend, training = config.backend, config.training
        options = {"learning_rate": training.learning_rate, "beta": training.beta}
        internal = {
            "trainer_args": options | training.trainer_args,
            "init_args": backend.init_args,
            "engine_args": backend.engine_args,
        }
        return cls(
            name=backend.name,
            project=backend.project,
            base_model=backend.base_model,
            internal_config={key: value for key, value in internal.items() if value is not None},
        )


class ArtTrajectory(BaseModel):
    """ART's `Trajectory`: the messages of an episode, and its reward. ART has defaults for other fields."""

    messages_and_choices: list[Json] = Field(default_factory=list)
    """Messages, and the choices that the model sampled among them."""
    tools: list[Tool] | None = None
    reward: FiniteFloat = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metadata: Json = Field(default_factory=dict)


class ArtGroup(BaseModel):
    """ART's `TrajectoryGroup`: the trajectories of one example."""

    trajectories: list[ArtTrajectory] = Field(default_factory=list)


def to_art_groups(collection: TrajectoryCollection) -> ArtGroups:
    """Return the collection as ART's groups, without the trajectories that ART cannot train on.

    Raises CapabilityError for step rewards, which ART does not support. Raises TrainingError if nothing is
    left, because an ART server would report such a batch as done.
    """
    rejected: Counter[str] = Counter()
    groups: list[Json] = []
    for group in collection.trajectories:
        kept: list[ArtTrajectory] = []
        for trajectory in group:
            if trajectory.shaped_rewards is not None:
                raise CapabilityError(
                    "ART trains with one reward for a whole trajectory, and there are step rewards; leave "
                    "them out, or choose the adapter 'local'"
                )
            try:
                kept.append(to_art_trajectory(trajectory))
            except ValueError as error:
                rejected[str(error)] += 1
        # The server skips groups with equal rewards silently, but counts the step.
        if len({each.reward for each in kept}) > 1:
            groups.append(ArtGroup(trajectories=kept).model_dump())
        elif kept:
            rejected[FLAT] += len(kept)
    if not groups:
        reasons = "; ".join(f"{number} × {reason}" for reason, number in rejected.most_common())
        raise TrainingError(
            f"job {collection.run_id}: ART can train on no trajectory of the batch: "
            f"{reasons or 'it is empty'}. Nothing was submitted."
        )
    return ArtGroups(groups, dict(rejected))


def check_episode_order(trajectory: Trajectory) -> None:
    """Raise ValueError unless the items are in an order that ART can train on.

    Items are system, user, assistant and tool messages. The first is a system or user message, the last an
    assistant message. Only system and tool messages may follow one of the same role. A tool message follows
    an assistant or tool message.
    """
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    roles = [item.role for item in items]
    if not roles:
        raise ValueError("it has no messages")
    others = sorted({str(role) for role in roles} - {"system", "user", "assistant", "tool"})
    if others:
        raise ValueError(f"it has messages with the role {', '.join(others)}")
    if roles[0] not in (EpisodeItemRole.SYSTEM, EpisodeItemRole.USER):
        raise ValueError(f"its first message has the role {roles[0]}, not system or user")
    if roles[-1] is not EpisodeItemRole.ASSISTANT:
        raise ValueError(f"its last message has the role {roles[-1]}, not assistant")
    # System messages may repeat, as in the reference. Results of parallel tool calls repeat too.
    may_repeat = (EpisodeItemRole.SYSTEM, EpisodeItemRole.TOOL)
    answering = (EpisodeItemRole.ASSISTANT, EpisodeItemRole.TOOL)
    for before, after in pairwise(roles):
        if before is after and after not in may_repeat:
            raise ValueError(f"it has consecutive {after} messages")
        if after is EpisodeItemRole.TOOL and before not in answering:
            raise ValueError(f"a tool message follows a {before} message")


def to_art_trajectory(trajectory: Trajectory) -> ArtTrajectory:
    """Return ART's `Trajectory`. Raises ValueError for an order or an answer that ART cannot train on."""
    check_episode_order(trajectory)
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    # ART trains on a whole choice. An answer with zero weight becomes a plain message.
    sampled = [item for item in items if item.is_sampled and (item.weights is None or any(item.weights))]
    if not sampled:
        raise ValueError("it has no message that the model sampled, or none to train on")
    facts = trajectory.metadata or {}
    return ArtTrajectory(
        messages_and_choices=[_choice(item) if item in sampled else _message(item) for item in items],
        tools=trajectory.tools or None,
        reward=trajectory.reward,
        initial_policy_version=sampled[0].model_version or 0,
        final_policy_version=sampled[-1].model_version or 0,
        metadata={key: value for key, value in facts.items() if isinstance(value, str | int | float | bool)},
    )


def _choice(item: EpisodeItem) -> Json:
    """Return an answer with its tokens by id, in vLLM's notation, which ART's tokeniser reads."""
    ids, logprobs = item.token_ids, item.logprobs
    if not ids:
        raise ValueError("an answer has no token ids")
    if not isinstance(logprobs, tuple | list) or len(logprobs) != len(ids):
        raise ValueError("an answer has no logprobs for its tokens")
    content = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": item.finish_reason,
        "logprobs": {"content": content, "refusal": None},
        "message": {"refusal": None, **_message(item)},
    }


def _message(item: EpisodeItem) -> Json:
    facts = item.metadata or {}
    names = ("tool_calls", "tool_call_id", "name", "function_call", "refusal")
    kept = {key: facts[key] for key in names if key in facts}
    return {"role": item.role.value, "content": facts.get("content", item.content), **kept}


_REQUEST_SECONDS = 60.0
"""The time limit of each request, except the training request."""
SILENCE_SECONDS = 3600.0
"""The time without any data from the server after which a job fails."""


class ArtError(TrainingError):
    """A failed request to an ART server. `status` is the HTTP status of the answer, if there was one.

    `again` is the reason to retry; None if a retry is useless.
    """

    def __init__(self, message: str, status: int | None = None, again: RetryReason | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.again = again


class _Health(BaseModel):
    status: Literal["ok"]


class _Models(BaseModel):
    data: list[dict[str, Any]]


_ANY, _METRICS = TypeAdapter[Any](Any), TypeAdapter(dict[str, Any])
_HEALTH, _PREPARED = TypeAdapter(_Health), TypeAdapter(tuple[str, Any])
_MODELS = TypeAdapter(_Models)
_STEP = TypeAdapter[int](Annotated[int, Field(strict=True, ge=0)])


class _JsonClient:
    """A client of one address that answers with JSON. The status of every answer is checked.

    Requests are retried as in all clients, but the training request, which would train twice.
    """

    def __init__(self, name: str, url: str, api_key: str, hint: str = "") -> None:
        """Create the client without connecting. `hint` ends the error of an address that does not answer."""
        self.url = url.rstrip("/")
        self._name = f"the {name} {self.url}"
        self._hint = hint
        if api_key != "default":  # The reference sends this word when no key is set.
            keep_secret(api_key)
        self._http = httpx.AsyncClient(
            timeout=_REQUEST_SECONDS,
            headers={"authorization": f"Bearer {api_key}"} | UNCOMPRESSED,
            event_hooks={"response": [limit_answer]},
        )

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        await self._http.aclose()

    async def _json(
        self, kind: TypeAdapter[T], method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> T:
        timeout, request = self._http.timeout if seconds is None else seconds, f"{method} {path}"

        async def attempt() -> bytes:
            try:
                response = await self._http.request(method, f"{self.url}{path}", json=body, timeout=timeout)
            except httpx.RequestError as error:
                raise self._unreachable(request, error) from error
            if response.status_code != 200:
                raise self._refusal_error(request, response.status_code, response.content, response.headers)
            return response.content

        return self._parse(kind, await with_retries(attempt), request)

    def _parse(self, kind: TypeAdapter[T], answer: bytes, request: str) -> T:
        try:
            return kind.validate_json(answer)
        except ValidationError as error:
            shown = answer[:200].decode(errors="replace")
            raise ArtError(f"{self._name} answered {request} with {shown!r}") from error

    def _unreachable(self, request: str, error: httpx.RequestError) -> ArtError:
        # After a read timeout, the server may still be working on the request.
        again = None if isinstance(error, httpx.ReadTimeout) else RetryReason("connection")
        return ArtError(f"{self._name} did not answer {request} ({describe(error)}){self._hint}", again=again)

    def _refusal_error(
        self, request: str, status: int, content: bytes, headers: Mapping[str, str]
    ) -> ArtError:
        failure = to_failure(status, headers, content)
        later = failure.again if isinstance(failure, Retryable) else None
        return ArtError(f"{self._name} answered {request} with {failure}", status, later)


class ArtClient(_JsonClient):
    """A client for one model on one ART server."""

    def __init__(self, config: ARTTrainerAdapterConfig) -> None:
        super().__init__(
            "ART server",
            config.backend.url,
            config.backend.api_key.get_secret_value(),
            ". Is it running (`art run`), and is the address under 'backend' right?",
        )
        self._config = config
        self._model = ArtModel.from_config(config).model_dump(by_alias=True)

    async def check_health(self) -> None:
        """Raise ArtError unless the training server reports that it is healthy."""
        await self._json(_HEALTH, "GET", "/healthcheck")

    async def register(self) -> None:
        """Register the model at the server."""
        await self._json(_ANY, "POST", "/register", self._model)

    async def prepare(self) -> str:
        """Make the server load the model and start inference. Return the inference address that it gives."""
        body = {"model": self._model, "config": self._config.backend.server_config}
        path = "/_prepare_backend_for_training"
        # Loading the model and starting inference can take minutes.
        return (await self._json(_PREPARED, "POST", path, body, seconds=600.0))[0]

    async def step(self) -> int:
        """Return the model's step: the number of jobs that have trained it."""
        return await self._json(_STEP, "POST", "/_get_step", self._model)

    async def train(self, groups: list[Json]) -> AsyncIterator[dict[str, float]]:
        """Train on the groups, and yield the metrics of each gradient step as it happens.

        The end of the stream does not mean success: the protocol has no message for that.
        """
        training, beta = self._config.training, self._config.training.beta
        body = {
            "model": self._model,
            "trajectory_groups": groups,
            # The KL weight under its names in 0.4 and 0.5; each ignores the other. 0.5 reads `dev_config`.
            "config": {"learning_rate": training.learning_rate, "beta": beta, "kl_penalty_coef": beta},
            "dev_config": {"kl_penalty_coef": beta} | training.dev_config,
            "verbose": False,
        }
        path = "/_train_model"
        timeout = httpx.Timeout(_REQUEST_SECONDS, read=SILENCE_SECONDS)
        try:
            async with self._http.stream("POST", f"{self.url}{path}", json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    status, content = response.status_code, await response.aread()
                    raise self._refusal_error(f"POST {path}", status, content, response.headers)
                async for line in response.aiter_lines():
                    if line.strip():
                        metrics = self._parse(_METRICS, line.encode(), f"POST {path}")
                        yield {
                            key: float(value)
                            for key, value in metrics.items()
                            if isinstance(value, int | float) and not isinstance(value, bool)
                        }
        except httpx.RequestError as error:
            raise self._unreachable(f"POST {path}", error) from error


class ArtInference(_JsonClient):
    """A client for the OpenAI-compatible endpoint that serves the trained model."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """Create the client. `base_url` is the address that the agents sample from."""
        super().__init__("inference endpoint", base_url, api_key)

    async def models(self) -> list[str]:
        """Return the names of the served models. Raises ArtError."""
        return [str(model.get("id")) for model in (await self._json(_MODELS, "GET", "/models")).data]


_TOTALS = ("num_gradient_steps", "data/step_num_gradient_steps")
"""The key for a job's total number of gradient steps, in ART 0.4 and in 0.5. Each line has one of them."""


class ArtJob(BaseModel, frozen=True):
    """The record of a job, as far as a client can know it."""

    content: JobContent
    """The job's data and options. Every job starts from the model's last step."""
    before: int
    """The model's step when the job was submitted. A higher step shows that the job is done."""
    status: TrainingStatusEnum = TrainingStatusEnum.RUNNING
    message: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    version: ModelVersion | None = None
    """The version that the completed job made."""


class ArtJobs(BaseModel):
    """All jobs by name, and the run's base version. Each change is written to disk first."""

    base: ModelVersion | None = None
    """The version that the run started with; None before the start."""
    jobs: dict[str, ArtJob] = Field(default_factory=dict)
    _path: Path | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Load the jobs from a file, if it exists. Without a path, nothing is written to disk.

        Raises StoreError if the file is damaged.
        """
        try:
            found = cls() if path is None or not path.exists() else cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise StoreError(f"{path} is damaged ({error}); delete it and resume (`etude resume`)") from error
        found._path = path
        return found

    def put(self, name: str, job: ArtJob) -> None:
        """Store a job. Raises StoreError."""
        self.keep(jobs={**self.jobs, name: job})

    def keep(self, **changes: Any) -> None:
        """Store changed fields, such as `jobs` or `base`. Raises StoreError."""
        kept = self.model_copy(update=changes)
        if self._path is not None:
            write_atomically(self._path, kept.model_dump_json(indent=2))
        self.base, self.jobs = kept.base, kept.jobs


@dataclass(slots=True)
class ArtProgress:
    """The progress of a job, and its metrics."""

    given: ArtGroups
    steps: int = 0
    """The number of gradient steps so far."""
    total: int | None = None
    """The number of gradient steps that the server plans."""
    _values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, line: dict[str, float]) -> None:
        """Add the metrics of one line. A server that found nothing to train on reports 0 steps."""
        totals = [int(line[name]) for name in _TOTALS if name in line]
        self.total = totals[0] if totals else self.total
        self.steps += 0 if totals and totals[0] == 0 else 1
        for name, value in line.items():
            if name not in _TOTALS and math.isfinite(value):
                self._values[name].append(value)

    @property
    def percent(self) -> float | None:
        """The percentage of gradient steps done; None if the server does not report the total."""
        return min(100.0, 100.0 * self.steps / self.total) if self.total else None

    @property
    def metrics(self) -> dict[str, float]:
        """The mean metrics over the gradient steps, and the number of trajectories that were left out."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items()}
        rejected = float(sum(self.given.rejected.values()))
        return means | {"gradient_steps": float(self.steps), "rejected_trajectories": rejected}
