"""The client side of OpenAI's chat completions: encodes requests, and parses completions.

Token ids travel in the fields that vLLM added to the protocol: `return_token_ids` in the request,
`prompt_token_ids` in the answer and `token_ids` in its choice. Servers may instead name the tokens of
logprobs by their ids (`return_tokens_as_token_ids`). vLLM's other fields come from its
`ChatCompletionRequest` and `CompletionRequest` (0.12 and later).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Required, TypeAlias, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from etude.core.call import ChatRequest, Completion, Constraint, Sampling, Token, TopLogprobs, Usage
from etude.core.message import Message, message_text, tool_call
from etude.wire.request_body import field_path
from etude.wire.retries import Refusal, Retryable, error_text

M = TypeVar("M", bound=BaseModel)

_MOST_ROUNDED = 1e-4
"""Rounding error by which a logprob may exceed 0. In single precision, a logit minus a log-sum (both about
30) is off by a few times 2e-6. Servers that compute in lower precision are off by more."""
_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_Count: TypeAlias = Annotated[int, BeforeValidator(lambda value: value or 0), Field(ge=0, le=2**31)]
_NAMED = "token_id:"
"""vLLM's prefix for a token that is named by its id."""


class _Alternative(TypedDict, total=False):
    token: str
    logprob: Required[Annotated[float, Field(le=_MOST_ROUNDED, strict=True)]]


class _SampledToken(TypedDict, total=False):
    token: str
    # OpenAI and vLLM write -9999 for probability 0.
    logprob: Required[Annotated[float, Field(ge=-1e5, le=_MOST_ROUNDED, strict=True)]]
    top_logprobs: list[_Alternative] | None


class TokenLogprobs(BaseModel):
    """The tokens of an answer with their logprobs."""

    content: list[_SampledToken] | None = None


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(BaseModel):
    id: str | None = None
    function: _Function

    def as_chat(self, index: int) -> dict[str, Any]:
        # OpenAI sends a string of JSON; some servers send the object, or nothing for none.
        given = self.function.arguments
        arguments = given if isinstance(given, str) and given else to_json(given or {}).decode()
        return tool_call(self.id or f"call_{index}", self.function.name, arguments)


class _Message(BaseModel, extra="allow"):
    role: Any = None
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] = []
    # vLLM and OpenRouter name it `reasoning`; DeepSeek, SGLang and older vLLM versions name it as we do.
    thinking: str = Field(default="", validation_alias=AliasChoices("reasoning_content", "reasoning"))

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, wire: Any) -> Any:
        if not isinstance(wire, dict):
            return wire
        return {name: value for name, value in wire.items() if value not in (None, [], {})}

    def as_chat(self) -> Message:
        content = self.content
        message: Message = {
            "role": "assistant",
            "content": message_text({"content": content}) if isinstance(content, list) else content,
            **(self.model_extra or {}),
        }
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [call.as_chat(index) for index, call in enumerate(self.tool_calls)]
        return message


class Choice(BaseModel):
    """A choice of chat completions, or of the completions API."""

    message: _Message
    finish_reason: str | None = None
    prompt_token_ids: tuple[_TokenId, ...] | None = None
    token_ids: tuple[_TokenId, ...] | None = None
    logprobs: TokenLogprobs | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, wire: Any) -> Any:
        """Convert a choice of the completions API to one of chat completions."""
        if not isinstance(wire, dict) or "text" not in wire:
            return wire
        logprobs = wire.get("logprobs")
        if logprobs is not None:
            texts, values = logprobs["tokens"], logprobs["token_logprobs"]
            tops = logprobs.get("top_logprobs") or [None] * len(texts)
            content = [
                {
                    "token": token,
                    "logprob": logprob,
                    "top_logprobs": [{"token": name, "logprob": of} for name, of in (top or {}).items()],
                }
                for token, logprob, top in zip(texts, values, tops, strict=True)
            ]
            logprobs = {"content": content}
        return {**wire, "message": {"content": wire["text"]}, "logprobs": logprobs}

    @property
    def tokens(self) -> list[_SampledToken] | None:
        """The tokens with logprobs; None if the endpoint does not give them."""
        return None if self.logprobs is None else self.logprobs.content

    def sampled_tokens(self) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
        """Return the sampled tokens' ids and logprobs, each None if the endpoint does not give it."""
        ids, tokens = self.token_ids, self.tokens
        if tokens is None:
            return ids, None
        if ids is None and tokens:
            named = tuple([name for each in tokens if isinstance(name := _name_token(each), int)])
            ids = named if len(named) == len(tokens) else None
        elif ids is not None and len(ids) != len(tokens):
            raise Retryable(f"malformed answer: it has {len(tokens)} logprobs, and {len(ids)} token_ids")
        return ids, tuple([each["logprob"] for each in tokens])

    def tops(self, count: int) -> tuple[TopLogprobs, ...]:
        """Return the `count` likeliest tokens at each position; nothing if there are none."""
        tops = []
        for token in self.tokens or () if count else ():
            named = [(_name_token(each), each["logprob"]) for each in token.get("top_logprobs") or ()]
            # vLLM adds the sampled token if it is not among the likeliest.
            tops.append(tuple(sorted(named, key=lambda pair: -pair[1])[:count]))
        return tuple(tops) if any(tops) else ()


def _name_token(token: _SampledToken | _Alternative) -> Token:
    """Return a token's id if it is named by it, else its text."""
    name = token.get("token", "")
    number = name.removeprefix(_NAMED)
    return int(number) if number != name and number.isdecimal() else name


class _Details(BaseModel):
    cached_tokens: _Count = 0


class _Usage(BaseModel):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None
    prompt_cache_hit_tokens: _Count = 0
    """DeepSeek's name for the cached tokens."""

    def as_usage(self) -> Usage:
        details = self.prompt_tokens_details
        cached = (details and details.cached_tokens) or self.prompt_cache_hit_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, min(cached, self.prompt_tokens))


class _Answer(BaseModel):
    choices: list[Choice]
    prompt_token_ids: tuple[_TokenId, ...] | None = None
    usage: _Usage | None = None


def encode(body: Mapping[str, Any]) -> bytes:
    """Encode a body as JSON. Raises Refusal if a message contains a value that JSON cannot represent."""
    try:
        return to_json(body)
    except ValueError as error:
        raise Refusal(f"the request cannot be written as JSON: {error}", impossible=True) from error


def read_answer(kind: type[M], wire: Any) -> M:
    """Validate an answer or a part of it. Raises Retryable that names the first wrong field."""
    try:
        return kind.model_validate(wire)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{field_path(first['loc'])} is {first['input']!r:.40}: {first['msg']}"
        raise Retryable(f"malformed answer: {reason}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise Retryable(f"malformed answer: {type(error).__name__}: {error}") from error


def parse_completion(data: bytes, model_version: int = 0, *, top: int = 0) -> Completion:
    """Parse the completion in the body of a 200 answer.

    `top` is the requested number of likeliest tokens.

    Raises Retryable if the body is invalid: broken JSON, no choices, fields of the wrong type, different
    numbers of logprobs and tokens, impossible numbers. Raises Refusal if a content filter cut the answer.
    """
    try:
        reply = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Retryable(f"malformed JSON in the answer: {error}") from error
    if not isinstance(reply, dict) or not reply.get("choices"):
        # Some routers answer 200 with an error inside.
        reason = error_text(reply)
        raise Retryable(f"an answer without choices: {reason}" if reason else "an answer without choices")
    answer = read_answer(_Answer, reply)
    choice = answer.choices[0]
    reason = choice.finish_reason or ""
    if reason == "content_filter":
        raise Refusal("the endpoint's content filter cut the answer", cause="content_filter", impossible=True)
    if reason in ("abort", "error"):
        raise Retryable(f"the endpoint gave up on the answer (finish_reason {reason!r})")
    ids, logprobs = choice.sampled_tokens()
    texts = tuple([each.get("token", "") for each in choice.tokens or ()]) if ids is None else ()
    usual = "tool_calls" if choice.message.tool_calls else "stop"
    return Completion(
        message=choice.message.as_chat(),
        finish_reason="length" if reason == "length" else usual,
        # Chat completions have it outside the choice, completions inside.
        prompt_ids=answer.prompt_token_ids or choice.prompt_token_ids,
        completion_ids=ids,
        logprobs=logprobs,
        top_logprobs=choice.tops(top),
        token_texts=texts if any(texts) else (),
        usage=Usage() if answer.usage is None else answer.usage.as_usage(),
        model_version=model_version,
    )


def charged_for(data: bytes) -> Usage:
    """Return the tokens used according to the body of a 200 answer, even if the rest is invalid."""
    try:
        return _Usage.model_validate(from_json(data)["usage"]).as_usage()
    except (KeyError, TypeError, ValueError):
        return Usage()


_SEED_SHIFT = 32
"""Keys have 63 bits; some servers accept only 31 for a seed."""

_PLAIN = ("top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty")
_PENALTIES = ("frequency_penalty", "presence_penalty")

VLLM_FIELDS = frozenset({*_PLAIN, "structured_outputs", "chat_template_kwargs"})
"""Fields that vLLM added to OpenAI's."""

USUAL_FIELDS = frozenset({"messages", "prompt", "temperature", "top_p", "seed", "max_tokens", "stop"})
"""Fields that every endpoint accepts for every model."""


def request_fields(
    request: ChatRequest, more: Collection[str] = (), thinking: str | None = "reasoning_content"
) -> dict[str, Any]:
    """Return the request's own fields of a chat completions body, or of a completions body for a prompt.

    `more` are the `VLLM_FIELDS` that the endpoint accepts. `thinking` is its field for a model's thoughts
    in messages that are sent back; None leaves them out. Raises Refusal if the request needs a field that
    the endpoint does not accept.
    """
    sampling = request.sampling
    asked: dict[str, Any] = (
        {"messages": [_message_to_send(message, thinking) for message in request.messages]}
        if request.prompt is None
        else {"prompt": request.prompt}
    )
    fields = asked | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.key >> _SEED_SHIFT if sampling.seed is None else sampling.seed,
    }
    if sampling.max_tokens is not None:
        fields["max_tokens"] = sampling.max_tokens
    if sampling.stop:
        fields["stop"] = sampling.stop
    fields |= sampling_fields(sampling)
    match fields.get("structured_outputs"):
        case {"json_object": True}:
            fields["response_format"] = {"type": "json_object"}
            del fields["structured_outputs"]
        case {"json": schema}:
            named = {"name": "answer", "schema": schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
            del fields["structured_outputs"]
    if request.tools:
        kind, _, name = request.tool_choice.partition(":")
        fields["tools"] = request.tools
        if not request.parallel_tool_calls:
            fields["parallel_tool_calls"] = False
        if kind != "auto":
            fields["tool_choice"] = {"type": "function", "function": {"name": name}} if name else kind
    options = dict(request.template_options)
    if "reasoning_effort" in options:
        fields["reasoning_effort"] = options.pop("reasoning_effort")
    if options:
        fields["chat_template_kwargs"] = options
    if refused := sorted((VLLM_FIELDS - set(more)) & fields.keys()):
        raise Refusal(
            f"the endpoint is not known to take {', '.join(refused)}, which the call asks for; leave it out, "
            "or, if it does, set `provider: vllm`",
            impossible=True,
            param=refused[0],
        )
    return fields


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return parameters beyond temperature, top_p and length that differ from their defaults, as vLLM's."""
    changed = sampling.non_defaults()
    fields = {name: changed[name] for name in (*_PENALTIES, *_PLAIN) if name in changed}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    match sampling.constraint:
        case Constraint("json_object"):
            fields["structured_outputs"] = {"json_object": True}
        case Constraint("json_schema", text):
            fields["structured_outputs"] = {"json": json.loads(text)}
        case Constraint("choice", text):
            fields["structured_outputs"] = {"choice": json.loads(text)}
        case Constraint(kind, text):
            fields["structured_outputs"] = {kind: text}
    return fields


def _message_to_send(message: Message, thinking: str | None) -> Message:
    if "reasoning_content" not in message or thinking == "reasoning_content":
        return message
    sent = {name: value for name, value in message.items() if name != "reasoning_content"}
    return sent if thinking is None else sent | {thinking: message["reasoning_content"]}


FIRST_TOKENS = 256
"""Prompts with this many equal tokens at the start count as one conversation."""


def conversation_key(request: ChatRequest) -> str:
    """Return the conversation of a request: its episode, or else a digest of how it begins.

    The beginning is everything up to the first user message, or the first tokens of a prompt.
    """
    if request.conversation:
        return request.conversation
    if request.prompt is not None:
        return beginning_digest(request.prompt[:FIRST_TOKENS])
    count = next((at for at, each in enumerate(request.messages) if each.get("role") == "user"), 0)
    return beginning_digest(request.messages[: count + 1])


def beginning_digest(of: object) -> str:
    """Return a digest, by which conversations that begin alike share a name."""
    return hashlib.blake2b(repr(of).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
