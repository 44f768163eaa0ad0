"""Sampling parameters in requests: their limits, and changes within these limits."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, Strict, ValidationError, model_validator

from etude.core.call import Bias, Constraint, Count, Factor, Penalty, Sampling, Share, Temperature, TopP
from etude.core.errors import RequestError
from etude.wire.dialect import ChatBody

SAMPLING_NAMES = tuple(option.name for option in fields(Sampling))

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Flag: TypeAlias = Annotated[bool, Strict()]
"""A field that must be a boolean, not a number or a word that could be read as one."""
Integer: TypeAlias = Annotated[int, Strict()]
"""A field that must be an integer, not a text or a boolean."""
Stops: TypeAlias = Annotated[tuple[Text, ...], Field(max_length=128)]


_BY_TOKEN = BeforeValidator(lambda bias: dict(bias) if isinstance(bias, tuple) else bias)
"""Converts `Sampling`'s form of `logit_bias` to the form in requests."""


class SamplingFields(BaseModel):
    """The fields of `Sampling` in the form of requests."""

    temperature: Temperature | None = Field(default=None, strict=True)
    top_p: TopP | None = Field(default=None, strict=True)
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    stop: Text | Stops | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, strict=True)
    top_k: int | None = Field(default=None, ge=-1, strict=True)
    min_p: Share | None = Field(default=None, strict=True)
    min_tokens: Count | None = Field(default=None, strict=True)
    stop_token_ids: tuple[Annotated[Count, Strict()], ...] | None = None
    frequency_penalty: Penalty | None = Field(default=None, strict=True)
    presence_penalty: Penalty | None = Field(default=None, strict=True)
    repetition_penalty: Factor | None = Field(default=None, strict=True)
    logit_bias: Annotated[dict[Count, Bias], _BY_TOKEN] | None = None

    def given_values(self) -> dict[str, Any]:
        """Return the fields that are not None, in `Sampling`'s form."""
        values = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        if self.top_k == -1:  # vLLM's value for "all".
            values["top_k"] = 0
        return values


_FIELDS = tuple(SamplingFields.model_fields)


def change_sampling(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Return `base` with the given fields of `Sampling` changed. None leaves a field unchanged.

    Raises RequestError for an unknown name or an invalid value.
    """
    if unknown := [name for name in changes if name not in SAMPLING_NAMES]:
        raise RequestError(
            f"'{unknown[0]}' is not a sampling parameter; allowed: {', '.join(SAMPLING_NAMES)}",
            param=unknown[0],
        )
    wishes = {name: value for name, value in changes.items() if value is not None}
    if not wishes:
        return base
    constraint: Constraint | None = wishes.pop("constraint", None)
    try:
        given = SamplingFields.model_validate(wishes).given_values()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise RequestError(f"{name}: {first['msg']}, found {changes[name]!r:.80}", param=name) from error
    return apply_checked(base, given if constraint is None else {**given, "constraint": constraint})


def apply_checked(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """Return `base` changed by `given`, which `SamplingFields` has validated. Raises RequestError if
    `min_tokens` exceeds `max_tokens`."""
    changed = replace(base, **given)
    if changed.max_tokens is not None and changed.min_tokens > changed.max_tokens:
        raise RequestError(
            f"min_tokens is {changed.min_tokens}, but max_tokens is only {changed.max_tokens}, so no answer "
            "is long enough; change one of them",
            param="min_tokens",
        )
    return changed


BOOKKEEPING = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "thread", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"),
        "request_id",
        # OpenAI's own models were trained for it; no other model has such a setting.
        "verbosity",
    }
)
"""Parameters of OpenAI's APIs and vLLM's that do not change an answer."""


Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Allowed values by parameter."""


B = TypeVar("B", bound=BaseModel)


_TYPE_TAG = re.compile(
    r"(str|int|float|bool|constrained-\w+|(list|tuple|dict|literal|function-\w+|nullable)\[.*)$"
)
"""Names of union members, which pydantic adds to an error's location; clients know no such fields."""


class RequestBody(SamplingFields, extra="allow"):
    """The body of a request, which is honoured completely or refused.

    No parameter that would change the answer is ignored.
    """

    model: str | None = None
    stream: Flag | None = None

    free: ClassVar[Collection[str]] = BOOKKEEPING
    """Further parameters that do not change an answer."""
    neutral: ClassVar[Neutral] = {"service_tier": ("auto", "default", "flex"), "priority": (0,)}
    """Parameters that cannot be honoured, and their values that change nothing."""

    @model_validator(mode="after")
    def _require_known_parameters(self) -> RequestBody:
        """Raise RequestError, which pydantic passes on, because it names the parameter."""
        for name, value in (self.model_extra or {}).items():
            if name in self.free or value is None:
                continue
            if name not in self.neutral:
                raise RequestError(f"parameter '{name}' is not supported here; leave it out", param=name)
            if value not in self.neutral[name]:
                raise RequestError(
                    f"parameter '{name}' can only be {self.neutral[name][0]!r} here, found {value!r:.80}",
                    param=name,
                )
        return self

    def request(self, **fields: Any) -> ChatBody:
        """Return the request, for any API; `fields` come from the body's own API."""
        known: dict[str, Any] = {"model": self.model or "", "messages": (), "sampling": self.given_values()}
        return ChatBody(stream=bool(self.stream), **known | fields)


def validate_body(kind: type[B], body: Any, **defaults: Any) -> B:
    """Validate a request's body. Raises RequestError that lists up to five problems."""
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    try:
        return kind.model_validate(defaults | body)
    except ValidationError as error:
        message, param = describe_problems(error.errors(include_url=False))
        raise RequestError(message, param=param) from error


def describe_problems(errors: Iterable[Any]) -> tuple[str, str | None]:
    """Return pydantic's errors as a sentence, and the first wrong field, like `messages[0].role`."""
    problems, first = [], None
    for error in errors:
        field = field_path(error["loc"])
        first = first or field or None
        if error["type"] == "json_invalid":
            return f"the request is not JSON: {error.get('ctx', {}).get('error', '')}".rstrip(": "), None
        text = error["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {text}" if field else text)
    return "; ".join(dict.fromkeys(problems[:5])), first


def field_path(location: Iterable[Any]) -> str:
    """Return the place of pydantic's error as a path like `messages[0].role`."""
    path = ""
    for part in map(str, location):
        if part not in ("body", "query", "path") and not _TYPE_TAG.match(part):
            path += f"[{part}]" if part.isdecimal() else f".{part}" if path else part
    return path
