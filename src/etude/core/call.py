"""A call: one request to a model and its answer, exactly as they were.

The token ids and logprobs that the engine sampled are the truth from here to the gradient. Text is never
tokenised again for training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer

from etude.core.message import Message, Tool, is_same


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have. Tokens that would break it cannot be sampled."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""
    """The JSON schema, the regular expression, the choices as a JSON list of texts, or the Lark grammar."""


_LEAST_TEMPERATURE = 1e-6


def _not_almost_zero(temperature: float) -> float:
    """Refuse a temperature so small that the logits divided by it would not be finite."""
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"Input should be 0, or at least {_LEAST_TEMPERATURE:g}")
    return temperature


Temperature: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_not_almost_zero)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Factor: TypeAlias = Annotated[float, Field(ge=1e-3, le=1e3)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Fields and defaults follow OpenAI, and vLLM where OpenAI has none."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """The seed, which replaces the request's `key` if it is set."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample only from this number of the likeliest tokens; 0 for all."""
    min_p: Share = 0.0
    """Leave out tokens whose probability is below this share of the likeliest token's."""
    min_tokens: Count = 0
    """The answer cannot end before it has this number of tokens."""
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the answer, besides the model's own."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time that the answer contains it."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of all tokens that the answer contains."""
    repetition_penalty: Factor = 1.0
    """Divides positive logits of tokens in prompt or answer; multiplies negative ones (Keskar et al.,
    2019)."""
    logit_bias: tuple[tuple[Count, Bias], ...] = ()
    """Pairs of token id and bias. The bias is added to the token's logit."""
    constraint: Constraint | None = None

    def shape(self) -> Sampling:
        """Return only the parameters that change a token's distribution, not those that end answers."""
        without = {"max_tokens", "stop", "seed"}
        if not self.min_tokens:
            without.add("stop_token_ids")
        if not self.temperature:
            without |= {"top_k", "top_p", "min_p"}
        return Sampling(**{name: value for name, value in self.non_defaults().items() if name not in without})

    def non_defaults(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults, by name."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}


_DEFAULTS = tuple((option.name, option.default) for option in fields(Sampling))

PLAIN_SAMPLING = Sampling()
"""Sampling from the model's own distribution."""

SamplingField: TypeAlias = Annotated[Sampling, PlainSerializer(Sampling.non_defaults)]
"""A pydantic field that is serialized as the parameters that are not at their defaults."""

Token: TypeAlias = int | str
"""A token's id, or its text if an endpoint returns no ids."""

TopLogprobs: TypeAlias = tuple[tuple[Token, float], ...]
"""Tokens and their logprobs, the most likely first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that is still being sampled: new tokens, and the text that is now certain."""

    content: str = ""
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[TopLogprobs, ...] = ()
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to an engine for one completion."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    key: int = 0
    """The seed of this request's randomness. The same key and weights give the same completion."""
    conversation: str = ""
    """The episode that the request belongs to: a hint for reusing its KV cache."""
    earlier: tuple[Call, ...] = field(default=(), compare=False, repr=False)
    """Finished calls of the same episode to the same model, oldest first. An engine extends the tokens of the
    one that this prompt continues, and tokenises no sampled text again."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `function:NAME` for the tool that must be called."""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking` or `reasoning_effort`."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue without a chat template. Then `messages` only show the text to
    readers."""
    top_logprobs: int = 0
    """The number of likeliest tokens to report for each sampled token."""
    on_delta: Callable[[Delta], None] | None = field(default=None, compare=False, repr=False)
    """Called in the event loop with each piece of the answer, by engines that can stream. The pieces add up
    to the completion or to a part of it, and none is ever taken back."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The token ids of a request whose prompt is token ids."""
        assert isinstance(self.prompt, tuple)
        return self.prompt

    @property
    def seed(self) -> int:
        """The seed of the request's randomness."""
        return self.key if self.sampling.seed is None else self.sampling.seed


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the endpoint reports as cached."""

    def plus(self, other: Usage) -> Usage:
        """Return the sum of both."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of an engine."""

    message: Message
    """The assistant message in OpenAI's format: `content` and, if there are any, `tool_calls`."""
    finish_reason: str = "stop"
    """`stop`, `length` or `tool_calls`."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole prompt as the model saw it; None if the engine cannot tell."""
    completion_ids: tuple[int, ...] | None = None
    """Sampled token ids, including the end-of-turn token."""
    logprobs: tuple[float, ...] | None = None
    """Natural-log probability of each sampled token under the distribution it was sampled from. For greedy
    sampling: at temperature 1, without top_k, top_p and min_p."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The likeliest tokens at each sampled position, if the request asked and the engine can tell."""
    token_texts: tuple[str, ...] = ()
    """The texts of the tokens that have logprobs, if an endpoint returns no ids."""
    usage: Usage = field(default_factory=Usage)
    model_version: int = 0
    """Version of the weights that sampled this: 0 is the base model."""
    drifted: bool = False
    """True if the prompt could not extend the conversation's earlier tokens and was rendered anew."""
    fault: str = ""
    """The reason for `drifted`, if known: the kind of message that the template writes differently. Without
    `drifted`: why the model's family starts anew here on purpose."""
    constraint: Constraint | None = None
    """The constraint used in sampling, if the request's tools need another one than its `sampling` has."""

    @property
    def thinking(self) -> str:
        """The model's thinking before its answer; empty if there is none or the engine does not report it."""
        return str(self.message.get("reasoning_content") or "")


@dataclass(frozen=True, slots=True)
class Call:
    """One model call within an episode."""

    index: int
    """Order within the episode, from 0."""
    function: str
    """The agent's function that made the call; `<workflow>` outside of any function."""
    model: str
    """Name of the model in the config's `llms`."""
    request: ChatRequest
    completion: Completion | None = None
    error: str | None = None
    """The reason why there is no completion, for a call that failed after all retries."""
    retried: Mapping[str, int] = field(default_factory=dict)
    """The number of retries by the reason for the retry: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Seconds waited between the attempts."""
    began: float = field(default=0.0, compare=False)
    """Start of the call in Unix seconds; 0 if unknown."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the call took, with all attempts."""
    logged: bool = False
    """Whether the call was made before this run and read from a log. Its answer has no tokens of this run's
    model until a backend tokenises the text."""

    @property
    def retries(self) -> int:
        """The number of attempts after the first."""
        return sum(self.retried.values())


def continues(messages: Sequence[Message], earlier: Call) -> bool:
    """Return whether `messages` start with the messages of `earlier` and its reply."""
    if (
        earlier.completion is None
        or earlier.request.prompt is not None
        or len(messages) <= len(earlier.request.messages)
    ):
        return False
    history = (*earlier.request.messages, earlier.completion.message)
    return all(a == b or is_same(a, b) for a, b in zip(history, messages, strict=False))
