"""The bodies of ART's requests, as clients of its releases 0.4.11 and 0.5.17 write them, and their log.

Fields that do not bear on training are let through. Options of training are in `options`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from etude.core.errors import StoreError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool
from etude.integrations.art.serving.options import DevConfig, InternalConfig, TrainConfig
from etude.store.files import draft_of
from etude.wire.http_server import ApiError
from etude.wire.sampling import problems_of

B = TypeVar("B", bound=BaseModel)

_MOST_VALUES = 20_000_000
"""Of a body of trajectories, in which a token with its logprob has some ten."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
"""Names of models and splits. They name folders, and `@` and `:` have a meaning in names of models."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Kept(BaseModel):
    """Bodies that are kept as they came, with fields that are not trained on, for the log."""

    model_config = ConfigDict(extra="allow")


class ArtModel(_Body):
    """ART's `Model` and `TrainableModel`, which every request carries."""

    name: Annotated[str, Field(pattern=NAME)]
    project: str = Field(min_length=1, max_length=256)
    trainable: bool = False
    base_model: str | None = Field(default=None, min_length=1)
    internal: InternalConfig | None = Field(default=None, alias="_internal_config")


class ArtHistory(_Kept):
    """ART's `History`: messages, and among them the choices that the model sampled."""

    messages_and_choices: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[Tool] | None = None


class ArtTrajectory(ArtHistory):
    """ART's `Trajectory`."""

    additional_histories: list[ArtHistory] = Field(default_factory=list)
    reward: FiniteFloat = 0.0
    metrics: dict[str, Any] = Field(default_factory=dict)

    @property
    def histories(self) -> list[ArtHistory]:
        """Its own messages first."""
        return [self, *self.additional_histories]


class ArtGroup(_Kept):
    """ART's `TrajectoryGroup`."""

    trajectories: list[ArtTrajectory] = Field(default_factory=list)
    exceptions: list[Any] = Field(default_factory=list)

    @property
    def is_trainable(self) -> bool:
        """Whether its rewards differ, which is what can be learned from."""
        return len({trajectory.reward for trajectory in self.trajectories}) > 1


class ChoiceToken(_Body):
    """A sampled token in a choice's logprobs."""

    token: str
    logprob: FiniteFloat


class ChoiceLogprobs(_Body):
    """The logprobs of a choice."""

    content: list[ChoiceToken] | None = None
    refusal: list[ChoiceToken] | None = None


class ArtChoice(_Body):
    """OpenAI's `Choice`: what marks it among messages is its `finish_reason`."""

    message: Message
    logprobs: ChoiceLogprobs | None = None

    @property
    def tokens(self) -> list[ChoiceToken]:
        """The sampled tokens; none where they were not asked for."""
        return [] if self.logprobs is None else self.logprobs.content or self.logprobs.refusal or []

    @property
    def as_message(self) -> Message:
        """The message as a client would send it back."""
        kept = {key: value for key, value in self.message.items() if value is not None}
        return {"content": "", **kept, "role": "assistant"}


class TrainBody(_Body):
    """The body of `POST /_train_model`."""

    model: ArtModel
    trajectory_groups: list[ArtGroup]
    config: TrainConfig = Field(default_factory=TrainConfig)
    dev_config: DevConfig = Field(default_factory=DevConfig)


class LogBody(_Body):
    """The body of `POST /_log` (0.4)."""

    model: ArtModel
    trajectory_groups: list[ArtGroup]
    split: Annotated[str, Field(pattern=NAME)] = "val"


class KeepBody(_Body):
    """The body of `POST /_delete_checkpoint_files` (0.5)."""

    model: ArtModel
    steps_to_keep: list[Annotated[int, Field(ge=0)]]


class PreviewModelBody(_Body):
    """The body of `POST /v1/preview/models`."""

    entity: str | None = Field(default=None, pattern=NAME)
    project: Annotated[str, Field(pattern=NAME)]
    name: Annotated[str, Field(pattern=NAME)]
    base_model: str = Field(min_length=1)
    return_existing: bool = False


class PreviewTrainBody(_Body):
    """The body of `POST /v1/preview/training-jobs`."""

    model_id: str
    trajectory_groups: list[ArtGroup]
    experimental_config: dict[str, Any] | None = None


class PreviewLogBody(_Body):
    """The body of `POST /v1/preview/models/{id}/log`."""

    trajectory_groups: list[ArtGroup]
    split: Annotated[str, Field(pattern=NAME)] = "val"


class PreviewStepsBody(_Body):
    """The body of `DELETE /v1/preview/models/{id}/checkpoints`."""

    steps: list[Annotated[int, Field(ge=0)]]


def parsed(kind: type[B], body: bytes) -> B:
    """A body that is too large to be read between two other requests. Raises ApiError."""
    try:
        data = read_json(body, most_values=_MOST_VALUES)
    except ValueError as error:
        raise ApiError(400, f"the request is not JSON: {error}", code="invalid_value") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        message, param = problems_of(error.errors(include_url=False, include_input=False))
        raise ApiError(400, message, param=param, code="invalid_value") from error


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """For the OpenAPI document of a route that reads its body with `parsed`."""
    fields = kind.model_fields
    required = [name for name, field in fields.items() if field.is_required()]
    schema = {"type": "object", "required": required, "properties": {name: {} for name in fields}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def without_logprobs(group: ArtGroup) -> str:
    """A group as a line of JSON, without what only training needs."""
    wire = group.model_dump(mode="json")
    for trajectory in wire["trajectories"]:
        for history in (trajectory, *trajectory["additional_histories"]):
            for message in history["messages_and_choices"]:
                message.pop("logprobs", None)
    return json.dumps(wire) + "\n"


class ArtLog:
    """`art/<model>/<split>/<step>.jsonl` in the data folder, a group a line."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "art"

    def write(self, model: str, split: str, step: int, groups: Iterable[ArtGroup]) -> None:
        """Keep the groups of a step, in place of those of an earlier try. Raises StoreError."""
        with draft_of(self._folder / model / split / f"{step:04d}.jsonl") as draft:
            draft.write_text("".join(map(without_logprobs, groups)), encoding="utf-8")

    def best_step(self, model: str, metric: str, alpha: float) -> int | None:
        """The step where a metric (`val/reward`) was highest; None where it was never logged.

        `alpha` is the weight of a step in the moving average (1: the step alone). Raises StoreError.
        """
        split, _, name = metric.partition("/")
        best: tuple[float, int] | None = None
        average = weight = 0.0
        for path in sorted(self._files(model, split)):
            values = _values(path, name)
            if not values:
                continue
            # Weights as of polars' ewm_mean, which ART takes.
            average = average * (1 - alpha) + math.fsum(values) / len(values)
            weight = weight * (1 - alpha) + 1
            best = max(best or (-math.inf, 0), (average / weight, int(path.stem)))
        return None if best is None else best[1]

    def _files(self, model: str, split: str) -> list[Path]:
        """Of a split that clients name: looked up, and never made part of a path."""
        return [path for path in (self._folder / model).glob("*/*.jsonl") if path.parent.name == split]


def _values(path: Path, name: str) -> list[float]:
    try:
        groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    values = [
        trajectory["reward"] if name == "reward" else trajectory["metrics"].get(name)
        for group in groups
        for trajectory in group["trajectories"]
    ]
    return [float(value) for value in values if isinstance(value, int | float)]
