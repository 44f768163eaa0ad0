"""The parameters of sampling: their limits, and changing how to sample within them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, Strict, ValidationError

from etude.core.call import Bias, Constraint, Count, Factor, Penalty, Sampling, Share, Temperature, TopP
from etude.core.errors import RequestError

SAMPLING_NAMES = tuple(option.name for option in fields(Sampling))

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Flag: TypeAlias = Annotated[bool, Strict()]
"""A field that is true or false, and not a number or a word that could be taken for it."""
Integer: TypeAlias = Annotated[int, Strict()]
"""A field that is a whole number, and not a text or true or false."""
Stops: TypeAlias = Annotated[tuple[Text, ...], Field(max_length=128)]


def _by_token(bias: Any) -> Any:
    """A `logit_bias` as requests have it, also of one that `Sampling` keeps."""
    return dict(bias) if isinstance(bias, tuple) else bias


class SamplingFields(BaseModel):
    """The fields of `Sampling` as requests give them."""

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
    logit_bias: Annotated[dict[Count, Bias], BeforeValidator(_by_token)] | None = None
    constraint: Constraint | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None, as `Sampling` keeps them."""
        values = {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        if self.top_k == -1:  # As vLLM says "all".
            values["top_k"] = 0
        return values


def change_sampling(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """`base` with the given fields of `Sampling` changed. None leaves a field as it is.

    Raises RequestError for an unknown name or an impossible value.
    """
    if unknown := [name for name in changes if name not in SAMPLING_NAMES]:
        raise RequestError(
            f"'{unknown[0]}' is not a sampling parameter; allowed: {', '.join(SAMPLING_NAMES)}",
            param=unknown[0],
        )
    wishes = {name: value for name, value in changes.items() if value is not None}
    if not wishes:
        return base
    try:
        given = SamplingFields.model_validate(wishes).given()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise RequestError(f"{name}: {first['msg']}, found {changes[name]!r:.80}", param=name) from error
    return with_checked(base, given)


def with_checked(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with what `SamplingFields` has checked and `given`. Raises RequestError where two of them
    contradict each other."""
    changed = replace(base, **given)
    if changed.max_tokens is not None and changed.min_tokens > changed.max_tokens:
        raise RequestError(
            f"min_tokens is {changed.min_tokens}, and max_tokens only {changed.max_tokens}: no answer is as "
            "long; change one of them",
            param="min_tokens",
        )
    return changed
