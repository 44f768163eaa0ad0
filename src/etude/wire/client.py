"""OpenAI's chat completions, spoken to an endpoint: completions and failures in; requests are made in
`etude.wire.asking`.

Token ids travel in the fields that vLLM added to the protocol: `return_token_ids` in the request,
`prompt_token_ids` in the answer and `token_ids` in its choice. Servers that name the tokens of the
logprobs by their ids instead (`return_tokens_as_token_ids`) are understood as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from etude.core.call import Completion, Usage
from etude.core.errors import EngineError, ImpossibleCall, PromptTooLong
from etude.core.message import Message
from etude.wire.dialect import tool_call
from etude.wire.logprobs import (
    Impossible,
    named_ids,
    read_prompt_logprobs,
    require_ids,
    require_logprobs,
    texts_of,
    tops_of,
)
from etude.wire.retries import is_worth_retrying, retry_after

_REQUEST_AT_FAULT = frozenset({400, 413, 422})
_WRONG_SCHEME = ("http request to an https server", "http request was sent to https port")
"""How Go's servers and nginx say, by status 400, that they were not spoken to in TLS."""
_SHOWN_CHARACTERS = 300
_MOST_TOKENS = 2**31
"""That one call can have used."""
_LOGPROB = "choices[0].logprobs.content[#].logprob"


class Refused(Exception):
    """The endpoint will not answer this request, however often it is asked."""

    def __init__(
        self,
        reason: str,
        *,
        cause: str = "refused",
        impossible: bool = False,
        param: str | None = None,
        is_too_long: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        """In a word: `http_401`, …"""
        self.impossible = impossible
        """Whether the request is at fault: not the key, the address or the account."""
        self.param = param
        """The field of the request that is, where the endpoint says so."""
        self.is_too_long = is_too_long
        """Whether the prompt leaves no room for an answer."""

    def error(self, reason: str) -> EngineError:
        """The same for whoever asked; `reason` says where, too."""
        if not self.impossible:
            return EngineError(reason)
        return PromptTooLong(reason) if self.is_too_long else ImpossibleCall(reason, param=self.param)


class Disturbed(Exception):
    """There is no usable answer this time; another attempt may get one."""

    def __init__(
        self,
        reason: str,
        retry_after: float | None = None,
        *,
        cause: str = "malformed",
        is_gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        """In a word, as retries are counted by: `http_503`, `timeout`, `connection`, `malformed`, …"""
        self.retry_after = retry_after
        """Seconds that the endpoint asked to wait, where it did."""
        self.is_gone = is_gone
        """Whether nothing is to be had there for now, whatever is asked."""


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. Raises Refused when a message holds something that JSON cannot."""
    try:
        return to_json(body)
    except ValueError as error:
        raise Refused(f"the request cannot be written as JSON: {error}", impossible=True) from error


def failure_of(status: int, headers: Mapping[str, str], data: bytes) -> Refused | Disturbed:
    """The meaning of an answer other than 200: worth another attempt or not."""
    try:
        body = from_json(data)
    except ValueError:
        body = data.decode(errors="replace").strip()
    text = error_text(body)
    reason = f"HTTP {status}: {text}" if text else f"HTTP {status}"
    cause = f"http_{status}"
    out_of_money = status == 429 and "insufficient_quota" in reason
    if is_worth_retrying(status) and not out_of_money:
        return Disturbed(reason, retry_after(headers), cause=cause)
    if any(words in reason.lower() for words in _WRONG_SCHEME):
        return Refused(f"{reason}: write https:// in place of http:// in `base_url`", cause="scheme")
    location = headers.get("location")
    if 300 <= status < 400 and location:
        reason = f"{reason}: redirected to {location}; give that address as `base_url`"
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    return Refused(
        reason,
        cause=cause,
        impossible=status in _REQUEST_AT_FAULT,
        param=param if isinstance(param := fields.get("param"), str) else None,
        is_too_long=fields.get("code") == "context_length_exceeded",
    )


def error_text(body: Any) -> str:
    """The sentence in an error body, wherever this kind of server puts it, cut to a readable length."""
    while isinstance(body, dict):
        if isinstance(body.get("message"), str):
            code = body.get("code") or body.get("type")
            body = f"{body['message']} ({code})" if code else body["message"]
        else:
            body = body.get("error") or body.get("detail")
    text = " ".join(str(body).split()) if body else ""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def parse_completion(
    data: bytes,
    model_version: int = 0,
    vocabulary: int | None = None,
    *,
    top: int = 0,
    prompt_top: int = 0,
    model: str | None = None,
) -> Completion:
    """The completion in the body of a 200 answer.

    `top` and `prompt_top` are how many of the likeliest tokens were asked for. `model` is the only name that
    the answer may have for its model, where it has one.

    Raises Disturbed when the body is not one: broken JSON, no choices, fields of the wrong type, as many
    logprobs as there are not tokens, numbers that cannot be. Raises Refused when a content filter cut it.
    """
    try:
        reply = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Disturbed(f"malformed JSON in the answer: {error}") from error
    try:
        choice = _only_choice(reply)
        if model is not None and reply.get("model") not in (None, model):
            answerer = repr(reply["model"])[:_SHOWN_CHARACTERS]
            raise Disturbed(
                f"the model {answerer} answered in place of '{model}'", cause="no_model", is_gone=True
            )
        if "text" in choice:
            choice = _as_chat(choice)
        message = _message(choice["message"])
        tokens = (choice.get("logprobs") or {}).get("content")
        completion_ids, logprobs = _sampled(choice, tokens, vocabulary)
        prompt_ids = _ids(_of_prompt("token_ids", reply, choice), vocabulary, "prompt_token_ids")
        usage = _usage(reply.get("usage"))
        scores = read_prompt_logprobs(_of_prompt("logprobs", reply, choice), prompt_ids, prompt_top)
        return Completion(
            message=message,
            finish_reason=_finish_reason(choice.get("finish_reason"), message),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            top_logprobs=tops_of(tokens or (), top) if top else (),
            token_texts=texts_of(tokens or ()) if completion_ids is None else (),
            prompt_logprobs=tuple([own for own, _ in scores]),
            prompt_top=tuple([top for _, top in scores]),
            usage=usage,
            model_version=model_version,
        )
    except Impossible as error:
        raise Disturbed(f"malformed answer: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Disturbed(f"malformed answer: {type(error).__name__}: {error}") from error


def _sampled(
    choice: Mapping[str, Any], tokens: Any, vocabulary: int | None
) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """The ids of the sampled tokens, and their logprobs; None for what the endpoint does not tell."""
    values = None if tokens is None else [token["logprob"] for token in tokens]
    logprobs = None if values is None else require_logprobs(values, _LOGPROB)
    ids = _ids(choice.get("token_ids"), vocabulary, "choices[0].token_ids")
    if ids is None:
        ids = _ids(named_ids(tokens or ()), vocabulary, "choices[0].logprobs.content")
    if logprobs is not None and ids is not None and len(logprobs) != len(ids):
        count = f"choices[0].logprobs.content has {len(logprobs)} logprobs"
        raise Impossible(f"{count}, and choices[0].token_ids {len(ids)} tokens")
    return ids, logprobs


def _of_prompt(name: str, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
    """A field about the prompt, which chat completions have outside of the choice and completions inside."""
    return reply.get(f"prompt_{name}") or choice.get(f"prompt_{name}")


def _as_chat(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of the completions API as one of chat completions."""
    wire = choice.get("logprobs")
    logprobs = None
    if wire is not None:
        tops = wire.get("top_logprobs") or [{}] * len(wire["tokens"])
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
    """The tokens that the body of a 200 answer says were used, whatever else is wrong with it."""
    try:
        return _usage(from_json(data)["usage"])
    except (KeyError, TypeError, ValueError):
        return Usage()


def _usage(wire: Any) -> Usage:
    if not isinstance(wire, dict | None):
        raise Impossible(f"usage is {wire!r:.40}, and no object")
    counts = wire or {}
    prompt, completion = (_count(counts, name) for name in ("prompt_tokens", "completion_tokens"))
    details = counts.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    cached = cached or _count(counts, "prompt_cache_hit_tokens")  # DeepSeek's own field.
    return Usage(prompt, completion, min(cached, prompt))


def _count(wire: Mapping[str, Any], name: str) -> int:
    """A number of tokens. Raises Impossible for what is none."""
    value = wire.get(name)
    if value is None:
        return 0
    if type(value) not in (int, float) or not 0 <= value <= _MOST_TOKENS or value != int(value):
        raise Impossible(f"usage.{name} is {value!r:.40}; that is no number of tokens")
    return int(value)


def _only_choice(reply: Any) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        # Some routers answer 200 with an error inside.
        reason = error_text(reply)
        raise Disturbed(f"an answer without choices: {reason}" if reason else "an answer without choices")
    if not isinstance(choices[0], dict):
        raise Disturbed("malformed answer: the choice is not an object")
    return choices[0]


def _message(wire: dict[str, Any]) -> Message:
    """The assistant message, without the fields that say nothing."""
    content = wire.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if content is not None and not isinstance(content, str):
        raise Impossible(f"choices[0].message.content is {content!r:.40}, and no text")
    message: Message = {"role": "assistant", "content": content}
    for name, value in wire.items():
        # vLLM and OpenRouter say `reasoning`; DeepSeek, SGLang and earlier versions of vLLM as we do.
        own = "reasoning_content" if name == "reasoning" else name
        if own not in message and value not in (None, [], {}):
            message[own] = value
    if not isinstance(message.get("reasoning_content", ""), str):
        raise Impossible(f"choices[0].message.reasoning is {message['reasoning_content']!r:.40}, and no text")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call, index) for index, call in enumerate(message["tool_calls"])]
    return message


def _tool_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    name, arguments, id = call["function"]["name"], call["function"]["arguments"], call.get("id")
    for field, value in (("id", id or ""), ("function.name", name)):
        if not isinstance(value, str):
            raise Impossible(f"choices[0].message.tool_calls[{index}].{field} is {value!r:.40}, and no text")
    if not isinstance(arguments, str):
        # OpenAI sends a string of JSON; some servers send the object.
        arguments = to_json(arguments).decode()
    return tool_call(id or f"call_{index}", name, arguments)


def _ids(wire: Any, vocabulary: int | None, field: str) -> tuple[int, ...] | None:
    if wire is None:
        return None
    if not isinstance(wire, list | tuple):
        raise Impossible(f"{field} is {wire!r:.40}, and no list of token ids")
    return require_ids(wire, vocabulary, field)


def _finish_reason(wire: Any, message: Message) -> str:
    if not isinstance(wire, str | None):
        raise Impossible(f"choices[0].finish_reason is {wire!r:.40}, and no text")
    if wire == "content_filter":
        raise Refused("the endpoint's content filter cut the answer", cause="content_filter", impossible=True)
    if wire in ("abort", "error"):
        raise Disturbed(f"the endpoint gave up on the answer (finish_reason {wire!r})")
    if wire == "length":
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"
