"""The bodies of ART's requests, as the clients of its releases 0.4.11 and 0.5.17 write them.

Fields that do not bear on training are let through. Options of training are in `options`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from etude.core.message import Message, Tool
from etude.integrations.art.serving.options import DevConfig, InternalConfig, TrainConfig
from etude.server.errors import ApiError, problems_of

B = TypeVar("B", bound=BaseModel)

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
"""Names of models and splits. They name folders, and `@` and `:` have a meaning in names of models."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Kept(BaseModel):
    """What is more than trained on: it is kept as it came, for the log."""

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
        return len({one.reward for one in self.trajectories}) > 1


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
        return kind.model_validate_json(body)
    except ValidationError as error:
        told, param = problems_of(error.errors(include_url=False, include_input=False))
        raise ApiError(400, told, param=param, code="invalid_value") from error


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
            for one in history["messages_and_choices"]:
                one.pop("logprobs", None)
    return json.dumps(wire) + "\n"
