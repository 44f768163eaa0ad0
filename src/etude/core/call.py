"""A call: one request to a model and what came back, exactly.

The token ids and logprobs that the engine sampled are the truth from here to the gradient; text
is never tokenised again for training.
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
    """The schema as JSON, the regular expression, the choices as a JSON list of texts, or the grammar in
    Lark's notation."""


_LEAST_TEMPERATURE = 1e-6


def _not_almost_zero(temperature: float) -> float:
    """Logits that are divided by less would not be finite."""
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
    """How to sample. Fields and defaults are OpenAI's, and vLLM's where OpenAI has none."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """When set, takes the place of the request's own key."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """How many of the likeliest tokens are left to choose from; 0 for all."""
    min_p: Share = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out."""
    min_tokens: Count = 0
    """The answer cannot end before it has as many."""
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the answer, besides the model's own."""
    frequency_penalty: Penalty = 0.0
    """Taken from a token's logit for each time that the answer has it."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of all tokens that the answer has."""
    repetition_penalty: Factor = 1.0
    """Divides the positive logits of tokens that prompt or answer have, and multiplies the negative ones
    (Keskar et al., 2019)."""
    logit_bias: tuple[tuple[Count, Bias], ...] = ()
    """Added to the logits of tokens, by their ids."""
    constraint: Constraint | None = None

    def shape(self) -> Sampling:
        """As far as the distribution of a token depends on it, which how the answer ends does not change."""
        without = {"max_tokens", "stop", "seed"}
        if not self.min_tokens:
            without.add("stop_token_ids")
        if not self.temperature:
            without |= {"top_k", "top_p", "min_p"}
        return Sampling(**{name: value for name, value in self.changed().items() if name not in without})

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults, by name."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}


_DEFAULTS = tuple((option.name, option.default) for option in fields(Sampling))

PLAIN_SAMPLING = Sampling()
"""Sampling from the model's own distribution."""

SamplingField: TypeAlias = Annotated[Sampling, PlainSerializer(Sampling.changed)]
"""A field of a pydantic model that is written as the parameters that are not at their defaults."""

Token: TypeAlias = int | str
"""A token by its id, or by its text where an endpoint tells no ids."""

TopLogprobs: TypeAlias = tuple[tuple[Token, float], ...]
"""Tokens and their logprobs, the most likely first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that is still being sampled: at least a token, and what text it made certain."""

    content: str = ""
    reasoning: str = ""
    """A piece of the `reasoning_content`."""
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
    """Seed of this request's randomness; the same key and weights give the same completion."""
    conversation: str = ""
    """The episode that the request belongs to: a hint for reuse of its KV cache."""
    earlier: tuple[Call, ...] = field(default=(), compare=False, repr=False)
    """Finished calls of the same episode to the same model, oldest first. An engine extends the
    tokens of the one that this prompt continues, and never tokenises what was sampled again."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `function:NAME` for the tool that must be called."""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, like `enable_thinking` or `reasoning_effort`."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to go on from as they stand; `messages` then only say so to whoever reads them."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report for each sampled one."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report in the place of each one of the prompt, besides its own
    logprob; None for no logprobs of the prompt."""
    on_delta: Callable[[Delta], None] | None = field(default=None, compare=False, repr=False)
    """Called in the event loop with each piece of the answer, by engines that can; the pieces add up to the
    completion or to a part of it, and nothing is ever taken back."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt of a request that has token ids for it."""
        assert isinstance(self.prompt, tuple)
        return self.prompt

    @property
    def seed(self) -> int:
        """Of the request's randomness."""
        return self.key if self.sampling.seed is None else self.sampling.seed


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompt that the endpoint says it had in its cache."""

    def plus(self, other: Usage) -> Usage:
        """The tokens of both."""
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
    """The assistant message in OpenAI's format: `content` and, where there are any, `tool_calls`."""
    finish_reason: str = "stop"
    """`stop`, `length` or `tool_calls`."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole prompt as the model saw it; None where the engine cannot tell."""
    completion_ids: tuple[int, ...] | None = None
    """Sampled token ids, the end-of-turn token included."""
    logprobs: tuple[float, ...] | None = None
    """Natural-log probability of each sampled token under the distribution it was sampled from (of a greedy
    sample: at temperature 1 and without top_k, top_p and min_p)."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Of each sampled token the likeliest ones, where the request asked for them and the engine can tell."""
    token_texts: tuple[str, ...] = ()
    """Of the tokens that have logprobs, where an endpoint tells no ids."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens but the first, under the model at temperature 1, where the request asked."""
    prompt_top: tuple[TopLogprobs, ...] = ()
    """The likeliest tokens in the places of the same."""
    usage: Usage = field(default_factory=Usage)
    model_version: int = 0
    """Version of the weights that sampled this: 0 is the base model."""
    drifted: bool = False
    """True when the prompt could not extend the conversation's earlier tokens and was rendered anew."""
    fault: str = ""
    """Why it was, where the engine can tell: which kind of message its template writes differently. Without
    `drifted`: why the model's family begins anew here on purpose."""
    constraint: Constraint | None = None
    """The form that it was sampled in, where the request's tools ask for another than its sampling has."""
    address: str = ""
    """The one of the model's several addresses that answered; empty where it has only one."""

    @property
    def thinking(self) -> str:
        """The model's thinking before it answered; empty where it did not, or the engine does not tell."""
        return str(self.message.get("reasoning_content") or "")


@dataclass(frozen=True, slots=True)
class Call:
    """One model call within an episode."""

    index: int
    """Order within the episode, from 0."""
    function: str
    """The function of the agent that made the call; `<workflow>` outside of any."""
    model: str
    """Name of the model in the config's `llms`."""
    request: ChatRequest
    completion: Completion | None = None
    error: str | None = None
    """Why there is no completion, for a call that failed for good."""
    retried: Mapping[str, int] = field(default_factory=dict)
    """Attempts after the first, by why the one before gave no usable answer: `http_429`, `timeout`, …"""
    waited: float = 0.0
    """Seconds between the attempts."""
    began: float = field(default=0.0, compare=False)
    """When it was asked, in Unix seconds; 0 where that is not known."""
    seconds: float = field(default=0.0, compare=False)
    """That it took, with all attempts."""
    logged: bool = False
    """Whether it was made elsewhere and is known from a log: its answer has no tokens of this run's model
    until a backend makes them of the text."""

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return sum(self.retried.values())


def continues(messages: Sequence[Message], earlier: Call) -> bool:
    """Whether `messages` start with those of `earlier` and its reply."""
    if (
        earlier.completion is None
        or earlier.request.prompt is not None
        or len(messages) <= len(earlier.request.messages)
    ):
        return False
    history = (*earlier.request.messages, earlier.completion.message)
    return all(a == b or is_same(a, b) for a, b in zip(history, messages, strict=False))
