"""The client side of OpenAI's chat completions: encodes requests, and parses completions.

Token ids travel in the fields that vLLM added to the protocol: `return_token_ids` in the request,
`prompt_token_ids` in the answer and `token_ids` in its choice. Servers may instead name the tokens of
logprobs by their ids (`return_tokens_as_token_ids`). vLLM's other fields come from its
`ChatCompletionRequest` and `CompletionRequest` (0.12 and later).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from etude.core.call import ChatRequest, Completion, Constraint, Sampling, Usage
from etude.core.message import Message
from etude.wire.answers import BadAnswer, named_ids, read_tops, require_ids, require_logprobs, token_texts
from etude.wire.dialect import tool_call
from etude.wire.retries import Refusal, Retryable, error_text

_MOST_TOKENS = 2**31
"""Maximum number of tokens that one call can have used."""
_LOGPROB = "choices[0].logprobs.content[#].logprob"


def encode(body: Mapping[str, Any]) -> bytes:
    """Encode a body as JSON. Raises Refused if a message contains a value that JSON cannot represent."""
    try:
        return to_json(body)
    except ValueError as error:
        raise Refusal(f"the request cannot be written as JSON: {error}", impossible=True) from error


def parse_completion(data: bytes, model_version: int = 0, *, top: int = 0) -> Completion:
    """Parse the completion in the body of a 200 answer.

    `top` is the requested number of likeliest tokens.

    Raises Retryable if the body is invalid: broken JSON, no choices, fields of the wrong type, different
    numbers of logprobs and tokens, impossible numbers. Raises Refused if a content filter cut the answer.
    """
    try:
        reply = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Retryable(f"malformed JSON in the answer: {error}") from error
    try:
        choice = _only_choice(reply)
        if "text" in choice:
            choice = as_chat(choice)
        message = _message(choice["message"])
        tokens = (choice.get("logprobs") or {}).get("content")
        completion_ids, logprobs = read_tokens(choice, tokens, None)
        prompt_ids = _ids(
            # Chat completions have it outside the choice, completions inside.
            reply.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            None,
            "prompt_token_ids",
        )
        usage = _usage(reply.get("usage"))
        return Completion(
            message=message,
            finish_reason=_finish_reason(choice.get("finish_reason"), message),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            top_logprobs=read_tops(tokens or (), top) if top else (),
            token_texts=token_texts(tokens or ()) if completion_ids is None else (),
            usage=usage,
            model_version=model_version,
        )
    except BadAnswer as error:
        raise Retryable(f"malformed answer: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Retryable(f"malformed answer: {type(error).__name__}: {error}") from error


def read_tokens(
    choice: Mapping[str, Any], tokens: Any, vocabulary: int | None
) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Return the sampled tokens' ids and logprobs, each None if the endpoint does not give it."""
    values = None if tokens is None else [token["logprob"] for token in tokens]
    logprobs = None if values is None else require_logprobs(values, _LOGPROB)
    ids = _ids(choice.get("token_ids"), vocabulary, "choices[0].token_ids")
    if ids is None:
        ids = _ids(named_ids(tokens or ()), vocabulary, "choices[0].logprobs.content")
    if logprobs is not None and ids is not None and len(logprobs) != len(ids):
        count = f"choices[0].logprobs.content has {len(logprobs)} logprobs"
        raise BadAnswer(f"{count}, but choices[0].token_ids has {len(ids)} tokens")
    return ids, logprobs


def as_chat(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a choice of the completions API to one of chat completions."""
    wire = choice.get("logprobs")
    logprobs = None
    if wire is not None:
        tops = [top or {} for top in wire.get("top_logprobs") or [{}] * len(wire["tokens"])]
        logprobs = {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "top_logprobs": [{"token": other, "logprob": value} for other, value in top.items()],
                }
                for token, logprob, top in zip(wire["tokens"], wire["token_logprobs"], tops, strict=True)
            ]
        }
    return {**choice, "message": {"content": choice["text"]}, "logprobs": logprobs}


def charged_for(data: bytes) -> Usage:
    """Return the tokens used according to the body of a 200 answer, even if the rest is invalid."""
    try:
        return _usage(from_json(data)["usage"])
    except (KeyError, TypeError, ValueError):
        return Usage()


def _usage(wire: Any) -> Usage:
    if not isinstance(wire, dict | None):
        raise BadAnswer(f"usage is {wire!r:.40}, not an object")
    counts = wire or {}
    prompt, completion = (_count(counts, name) for name in ("prompt_tokens", "completion_tokens"))
    details = counts.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    cached = cached or _count(counts, "prompt_cache_hit_tokens")  # DeepSeek's own field.
    return Usage(prompt, completion, min(cached, prompt))


def _count(wire: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens. Raises Impossible for an invalid value."""
    value = wire.get(name)
    if value is None:
        return 0
    if type(value) not in (int, float) or not 0 <= value <= _MOST_TOKENS or value != int(value):
        raise BadAnswer(f"usage.{name} is {value!r:.40}, which is not a number of tokens")
    return int(value)


def _only_choice(reply: Any) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        # Some routers answer 200 with an error inside.
        reason = error_text(reply)
        raise Retryable(f"an answer without choices: {reason}" if reason else "an answer without choices")
    if not isinstance(choices[0], dict):
        raise Retryable("malformed answer: the choice is not an object")
    return choices[0]


def _message(wire: dict[str, Any]) -> Message:
    """Return the assistant message, without empty fields."""
    content = wire.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if content is not None and not isinstance(content, str):
        raise BadAnswer(f"choices[0].message.content is {content!r:.40}, not text")
    message: Message = {"role": "assistant", "content": content}
    for name, value in wire.items():
        # vLLM and OpenRouter name it `reasoning`; DeepSeek, SGLang and older vLLM versions name it as we do.
        own = "reasoning_content" if name == "reasoning" else name
        if own not in message and value not in (None, [], {}):
            message[own] = value
    if not isinstance(message.get("reasoning_content", ""), str):
        raise BadAnswer(f"choices[0].message.reasoning is {message['reasoning_content']!r:.40}, not text")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call, index) for index, call in enumerate(message["tool_calls"])]
    return message


def _tool_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    name, arguments, id = call["function"]["name"], call["function"]["arguments"], call.get("id")
    for field, value in (("id", id or ""), ("function.name", name)):
        if not isinstance(value, str):
            raise BadAnswer(f"choices[0].message.tool_calls[{index}].{field} is {value!r:.40}, not text")
    if not isinstance(arguments, str) or not arguments:
        # OpenAI sends a string of JSON; some servers send the object, or nothing for none.
        arguments = to_json(arguments or {}).decode()
    return tool_call(id or f"call_{index}", name, arguments)


def _ids(wire: Any, vocabulary: int | None, field: str) -> tuple[int, ...] | None:
    if wire is None:
        return None
    if not isinstance(wire, list | tuple):
        raise BadAnswer(f"{field} is {wire!r:.40}, not a list of token ids")
    return require_ids(wire, vocabulary, field)


def _finish_reason(wire: Any, message: Message) -> str:
    if not isinstance(wire, str | None):
        raise BadAnswer(f"choices[0].finish_reason is {wire!r:.40}, not text")
    if wire == "content_filter":
        raise Refusal("the endpoint's content filter cut the answer", cause="content_filter", impossible=True)
    if wire in ("abort", "error"):
        raise Retryable(f"the endpoint gave up on the answer (finish_reason {wire!r})")
    if wire == "length":
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"


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
    in messages that are sent back; None leaves them out. Raises Refused if the request needs a field that
    the endpoint does not accept.
    """
    sampling = request.sampling
    asked: dict[str, Any] = (
        {"messages": [_sent(message, thinking) for message in request.messages]}
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
    changed = sampling.changed()
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


def _sent(message: Message, thinking: str | None) -> Message:
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
