"""Request bodies of OpenAI's chat completions and completions, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, Field, model_validator
from pydantic_core import to_json

from etude.core.errors import RequestError
from etude.core.json_text import plain
from etude.core.message import Message, Tool
from etude.wire.dialect import ChatBody
from etude.wire.forms import Effort, Wish, choose_tools, only_one, read_format, read_structured
from etude.wire.sampling import Flag, Integer, Neutral, RequestBody

_MOST_ANSWERS = 4096
"""Maximum number of answers to one request."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

TokenIds: TypeAlias = list[Annotated[int, Field(ge=0, strict=True)]]


class StreamOptions(BaseModel, extra="forbid"):
    """Options of a stream. Usage comes at its end; its pieces are not padded to hide their length."""

    include_usage: Flag = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class InferenceBody(RequestBody):
    """The parameters that chat completions and completions share."""

    neutral: ClassVar[Neutral] = {
        **RequestBody.neutral,
        "modalities": (["text"],),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "skip_special_tokens": (False,),
        # Only tokenizers of another kind offer a choice.
        "spaces_between_special_tokens": (True, False),
        "add_special_tokens": (False,),
        "ignore_eos": (False,),
        "include_stop_str_in_output": (False,),
        "include_reasoning": (True,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "bad_words": ([],),
        "allowed_token_ids": ([],),
    }

    model: str
    n: Integer | None = Field(default=None, ge=1, le=128)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = Field(
        default=None, description="`text`, `json_object`, or `json_schema`, which is enforced."
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )
    return_token_ids: Flag | None = Field(default=None, description="vLLM: return token ids as well.")
    return_tokens_as_token_ids: Flag | None = Field(
        default=None, description="vLLM: name the tokens of logprobs by their ids, `token_id:7`."
    )

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters and the answer's constraint. Raises RequestError for two."""
        forms = (
            read_format(self.response_format, "response_format"),
            read_structured(self.structured_outputs),
        )
        return super().given_values() | only_one(forms)

    def request(self, **fields: Any) -> ChatBody:
        """Return the request without its prompts."""
        shared = {
            "n": self.n or 1,
            "include_usage": self.stream_options is not None and self.stream_options.include_usage,
            "return_token_ids": bool(self.return_token_ids),
            "tokens_as_ids": bool(self.return_tokens_as_token_ids),
        }
        return super().request(**shared | fields)


class ChatCompletionBody(InferenceBody):
    """The body of `POST /v1/chat/completions`."""

    neutral: ClassVar[Neutral] = {
        **InferenceBody.neutral,
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Wish | None = Field(
        default=None, description="`auto`, `none`, `required`, a function by its name, or `allowed_tools`."
    )
    parallel_tool_calls: Flag | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="vLLM: variables for the model's chat template."
    )
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    logprobs: Flag | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _is_a_conversation(self) -> ChatCompletionBody:
        check_conversation(self.messages, self.tools)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters; `max_completion_tokens` is the newer name of `max_tokens`."""
        newer = {"max_tokens": self.max_completion_tokens} if self.max_completion_tokens else {}
        return super().given_values() | newer

    def request(self, **fields: Any) -> ChatBody:
        """Return the request with its messages and tools."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        tools, tool_choice = choose_tools(tuple(self.tools or ()), self.tool_choice)
        return super().request(
            messages=tuple(map(without_unset, self.messages)),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_options=effort | (self.chat_template_kwargs or {}),
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            **fields,
        )


class CompletionBody(InferenceBody):
    """The body of `POST /v1/completions`."""

    neutral: ClassVar[Neutral] = {**InferenceBody.neutral, "add_special_tokens": (True,)}

    prompt: str | TokenIds | list[str] | list[TokenIds] = Field(min_length=1)
    logprobs: Integer | None = Field(default=None, ge=0, le=20)

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters. The API's default is 16 tokens."""
        return {"max_tokens": 16} | super().given_values()

    def request(self, **fields: Any) -> ChatBody:
        """Return the request with its prompts, which are texts or token ids."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        prompts = [prompt] if alone else prompt
        if len(prompts) * (self.n or 1) > _MOST_ANSWERS:
            raise RequestError(
                f"{len(prompts)} prompts with {self.n or 1} answers each are too many: at most "
                f"{_MOST_ANSWERS} answers to a request",
                param="prompt",
            )
        return super().request(
            prompts=tuple(each if isinstance(each, str) else tuple(each) for each in prompts),
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            **fields,
        )


def plain_messages(messages: Any) -> tuple[Message, ...]:
    """Copy messages to plain dicts from any SDK's objects, without unset fields.

    Raises RequestError if they are not a list of messages.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list, found {messages!r:.80}")
    if not messages:
        raise RequestError("messages must hold at least one message, found none")
    copies = []
    for index, message in enumerate(messages):
        try:
            copies.append(plain(message))
        except TypeError as error:
            raise RequestError(f"messages[{index}]: {error}") from error
    check_conversation(copies, None)
    return tuple(map(without_unset, copies))


def without_unset(message: Message) -> Message:
    """Return the message as the model sees it.

    SDK objects include unset fields. Without them, a message that a client sends back equals the one that it
    received. vLLM's field `reasoning` becomes `reasoning_content`.
    """
    if None not in message.values() and "reasoning" not in message:
        return message
    shown = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "reasoning" in shown:
        shown.setdefault("reasoning_content", shown.pop("reasoning"))
    return shown


def check_conversation(messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Raise RequestError for invalid messages and tools, and for results that no call asked for."""
    called: set[Any] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_message(message, where)
        if calls := message.get("tool_calls"):
            called.update(call.get("id") for call in calls)
        if message["role"] == "tool" and (id := message.get("tool_call_id")) not in called - {None}:
            problem = f"must be the id of a tool call of an earlier message, found {id!r:.80}"
            raise _wrong(f"{where}.tool_call_id", problem)
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{index}]")
    try:
        to_json([messages, tools])
    except ValueError as error:
        raise RequestError(f"messages and tools cannot be written as JSON: {error}") from error


def _check_tool(tool: Any, where: str) -> None:
    if not _has_function(tool):
        raise RequestError(
            f"{where}: a tool must be {{'type': 'function', 'function': {{'name': …}}}}, found {tool!r:.80}",
            param=where,
        )
    for name, kind, word in (
        ("parameters", dict, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        value = tool["function"].get(name)
        if value is not None and not isinstance(value, kind):
            raise _wrong(f"{where}.function.{name}", f"must be {word}, found {value!r:.80}")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(where, f"must be a dict with a role and a content, found {message!r:.80}")
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, found {role!r:.80}")
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{where}.content", "must be a string, a list of parts or null")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise _wrong(
                f"{where}.content[{number}].text", f"must be a string, found {part.get('text')!r:.80}"
            )
    if content is None and not (role == "assistant" and {"content", "tool_calls"} & message.keys()):
        raise _wrong(
            f"{where}.content", "is missing; only an assistant's message that calls tools may leave it out"
        )
    for name in ("reasoning", "reasoning_content", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise _wrong(f"{where}.{name}", f"must be a string, found {message[name]!r:.80}")
    for name in ("function_call", "audio", "refusal"):  # No chat template writes them.
        if message.get(name):
            raise _wrong(f"{where}.{name}", "is not supported here, because the model would not see it")
    if calls is not None and not (isinstance(calls, list) and all(map(_has_function, calls))):
        raise _wrong(f"{where}.tool_calls", "must be a list of calls, each of a function with a name")
    if any(not isinstance(call.get("id"), str | None) for call in calls or ()):
        raise _wrong(f"{where}.tool_calls", "must be calls whose ids are texts")


def _wrong(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem}", param=param)


def _has_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
