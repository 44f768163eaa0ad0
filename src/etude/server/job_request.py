"""The body of `POST /v1/fine_tuning/jobs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from etude.algorithms.algorithm import algorithm_type
from etude.core.keys import content_hash
from etude.core.trajectory import Method
from etude.server.hyperparameters import Hyperparameters, method_model, server_algorithms
from etude.server.ids import check_suffix

IDEMPOTENCY_FIELD = "idempotency_key"
"""In the metadata, where a client cannot send the header `Idempotency-Key`."""

SameFile = Callable[[str | None, str | None], bool]
"""Whether two files, by their ids, have the same content."""

_Key = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class MethodBody(BaseModel):
    """`method`: its type, an algorithm, and the hyperparameters under the type's name."""

    model_config = ConfigDict(extra="allow")

    type: Method

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: Method) -> Method:
        known = server_algorithms()
        if name not in known:
            raise ValueError(
                f"there is no algorithm '{name}' here. Allowed: {', '.join(known)}; the server takes others "
                "that it was started with: --algorithms module:Name"
            )
        return name

    @model_validator(mode="after")
    def _only_its_own(self) -> MethodBody:
        given = self.model_extra or {}
        if wrong := sorted(given.keys() - {self.type}):
            raise ValueError(f"the method is {self.type}, and there are options of {', '.join(wrong)}")
        if self.type in given:
            body = method_model(algorithm_type(self.type)).model_validate({self.type: given[self.type] or {}})
            self._asked = getattr(body, self.type).hyperparameters
        return self

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the method."""
        return self._asked

    _asked: Hyperparameters = PrivateAttr(default_factory=Hyperparameters)


class JobBody(BaseModel):
    """What to train, on what, and how."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    training_file: str = Field(min_length=1)
    validation_file: str | None = None
    method: MethodBody = Field(default_factory=lambda: MethodBody(type="supervised"))
    hyperparameters: Hyperparameters | None = Field(
        default=None, description="Deprecated by OpenAI in favour of `method`; supervised only."
    )
    suffix: str | None = Field(default=None, description="Part of the new model's name.")
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    integrations: list[Literal["none"]] | None = Field(default=None, max_length=0)

    @field_validator("suffix")
    @classmethod
    def _names_a_model(cls, suffix: str | None) -> str | None:
        return check_suffix(suffix) if suffix else None

    @model_validator(mode="after")
    def _told_once(self) -> JobBody:
        if self.hyperparameters is not None and "method" in self.model_fields_set:
            raise ValueError("hyperparameters belong under method")
        return self

    @property
    def asked(self) -> Hyperparameters:
        """The hyperparameters that the request gives."""
        return self.hyperparameters or self.method.hyperparameters

    def key(self, header: str | None) -> str | None:
        """What makes this request the same as an earlier one, if anything does."""
        return header or (self.metadata or {}).get(IDEMPOTENCY_FIELD) or None

    def hash(self) -> str:
        """Differs between requests for different jobs, but for their files."""
        told: dict[str, Any] = self.model_dump(
            mode="json", exclude_none=True, exclude={"training_file", "validation_file"}
        )
        return content_hash(told)

    def differences(self, job: Mapping[str, Any], same_file: SameFile) -> list[str]:
        """The fields in which this request is not the one that created `job`, a row of the database."""
        fields = {
            "model": self.model == job["model"],
            "method": self.method.type == job["method"],
            "training_file": same_file(self.training_file, job["training_file"]),
            "validation_file": same_file(self.validation_file, job["validation_file"]),
            "suffix": self.suffix == job["suffix"],
            "metadata": (self.metadata or {}) == job["metadata"],
            "seed": self.seed in (None, job["seed"]),
        }
        different = [name for name, same in fields.items() if not same]
        if not different and self.hash() != job["request_hash"]:
            return ["hyperparameters"]
        return different
