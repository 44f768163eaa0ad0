"""The bodies of inference requests, as OpenAI and vLLM define them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.core.call import Sampling
from etude.core.message import Message, Tool

TokenIds: TypeAlias = list[Annotated[int, Field(ge=0, strict=True)]]
Text: TypeAlias = Annotated[str, Field(min_length=1)]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True, False),
}
"""Parameters that are not honoured, and the values at which that changes nothing."""

_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Parameters that do not change what is sampled."""


class StreamOptions(BaseModel):
    """Additions to a stream of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class InferenceBody(BaseModel):
    """The parameters that chat completions and completions share.

    A request is honoured as it stands or refused: no parameter is ignored that would change the answer.
    """

    model_config = ConfigDict(extra="allow")

    model: Text
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(default=None, description="vLLM: give token ids as well.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="vLLM: name the tokens of logprobs by their ids, `token_id:7`."
    )

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> InferenceBody:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                raise ValueError(f"parameter '{name}' is not known here; leave it out")
            if value not in _NEUTRAL[name]:
                raise ValueError(f"parameter '{name}' can only be {_NEUTRAL[name][0]!r} here")
        return self

    @property
    def count(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None) -> Sampling:
        """How to sample, with OpenAI's defaults; the seed is given to each sequence on its own."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=max_tokens,
            stop=stop,
        )


class ChatBody(InferenceBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _is_a_conversation(self) -> ChatBody:
        check_conversation(self.messages, self.tools)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def with_tokens(self) -> ChatBody:
        """The request with logprobs, and tokens named by their ids, unless it says otherwise."""
        as_ids = self.return_tokens_as_token_ids is not False
        logprobs = self.logprobs is not False
        return self.model_copy(update={"logprobs": logprobs, "return_tokens_as_token_ids": as_ids})

    @property
    def wanted(self) -> int | None:
        """Most tokens of a completion, under the name that the request gave it."""
        return self.max_completion_tokens or self.max_tokens


def check_conversation(messages: list[Message], tools: list[Tool] | None) -> None:
    """Raise ValueError for messages and tools that are none."""
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}].role must be a string")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"messages[{index}].content must be a string, a list of parts or null")
        _check_calls(message, f"messages[{index}].tool_calls")
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{index}].function.name must be a string")
    _check_unicode(messages, "messages")
    _check_unicode(tools, "tools")


def _check_unicode(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair is no character") from error


def _check_calls(message: Message, where: str) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ValueError(f"{where} must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: each call needs a function with a name")


class CompletionBody(InferenceBody):
    """The body of `POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if alone else list(prompt)


class TokenizeBody(BaseModel):
    """The body of `POST /tokenize`, as vLLM has it: a prompt, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: Literal[True] = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        _check_unicode(self.messages, "messages")
        _check_unicode(self.tools, "tools")
        return self
