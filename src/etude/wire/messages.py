"""Anthropic's messages API for agents: requests in, answers out."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from etude.core.message import Message, Tool, tool_call
from etude.wire.dialect import (
    AnswerHeader,
    BlockStream,
    ChatBody,
    Dialect,
    Event,
    Kind,
    RecordedCompletion,
    arguments_object,
    arguments_text,
    as_parts,
)
from etude.wire.request_body import (
    Effort,
    Flag,
    Format,
    Integer,
    Neutral,
    RequestBody,
    Stops,
    check_conversation,
    choose_tool,
    validate_body,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    """Thinking in an earlier answer; the model's template decides whether later prompts have it."""

    type: Literal["thinking"]
    thinking: str


class _Redacted(BaseModel):
    """Thoughts that only Anthropic can read."""

    type: Literal["redacted_thinking"]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_Texts: TypeAlias = Annotated[list[_Text], BeforeValidator(as_parts)]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    """Optional, for a tool that returns nothing."""


_Block: TypeAlias = Annotated[
    _Text | _Thinking | _Redacted | _ToolUse | _ToolResult, Field(discriminator="type")
]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(as_parts)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        wrong = (_ToolResult,) if self.role == "assistant" else (_Thinking, _Redacted, _ToolUse)
        for block in self.content:
            if isinstance(block, wrong):
                raise ValueError(f"a message with the role {self.role} cannot have a {block.type}")
        return self

    def as_chat(self) -> Iterator[Message]:
        """Yield the chat messages for this message; each tool result of a user becomes its own message."""
        texts = [block for block in self.content if isinstance(block, _Text)]
        if self.role == "assistant":
            uses = [block for block in self.content if isinstance(block, _ToolUse)]
            calls = [tool_call(use.id, use.name, arguments_text(use.input)) for use in uses]
            content = _text(texts) or (None if calls else "")
            thoughts = "".join(block.thinking for block in self.content if isinstance(block, _Thinking))
            thinking = {"reasoning_content": thoughts} if thoughts else {}
            called = {"tool_calls": calls} if calls else {}
            yield {"role": "assistant", "content": content, **thinking, **called}
            return
        results = [block for block in self.content if isinstance(block, _ToolResult)]
        for result in results:
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _text(result.content or ())}
        if texts or not results:
            yield {"role": self.role, "content": _text(texts)}


def _text(blocks: Iterable[_Text]) -> str:
    return "".join(block.text for block in blocks)


class _Tool(BaseModel, extra="forbid"):
    """A tool that the agent runs; tools that the API runs have other types."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: Flag | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def as_chat(self) -> Tool:
        described = {"description": self.description} if self.description else {}
        strict = {"strict": True} if self.strict else {}
        function = {"name": self.name, "parameters": self.input_schema or {}, **described, **strict}
        return {"type": "function", "function": function}


class _Thought(BaseModel, extra="forbid"):
    """A setting for thinking. A budget is a target that a model may miss, as with Anthropic's models."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None
    """Thoughts are returned whole, also where they are to be summarised or left out."""


class _Output(BaseModel, extra="forbid"):
    """The format of an answer, and the reasoning effort for it."""

    effort: Effort | None = None
    format: Format = None


class MessagesBody(RequestBody):
    """The body of `POST /messages`."""

    free = frozenset(
        {
            *("metadata", "cache_control", "user_profile_id", "workspace_id"),
            "diagnostics",  # For a prompt cache.
        }
    )
    neutral: ClassVar[Neutral] = {
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "inference_geo": ("global",),
        "mcp_servers": ([],),
        # The last one is Claude Code's: clear no thinking.
        "context_management": ({}, {"edits": []}, {"edits": [_KEEP_THINKING]}),
    }

    messages: list[_Message] = Field(min_length=1)
    system: _Texts | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: _Thought | None = None
    output_config: _Output | None = None
    stop: Stops | None = Field(default=None, alias="stop_sequences")

    @model_validator(mode="after")
    def _require_user_last(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("a model cannot continue a partial answer here; end with a user message")
        return self

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters, with the answer's constraint."""
        form = self.output_config and self.output_config.format
        return super().given_values() | ({"constraint": form} if form else {})

    def request(self, **fields: Any) -> ChatBody:
        """Return the request, with its system prompt as the first message."""
        system = _text(self.system or ())
        messages = [chat for message in self.messages for chat in message.as_chat()]
        effort = self.output_config.effort if self.output_config else None
        wish = self.thinking.type if self.thinking else "adaptive"  # The model decides.
        thinking = {} if wish == "adaptive" else {"enable_thinking": wish == "enabled"}
        tools = tuple(tool.as_chat() for tool in self.tools or ())
        return super().request(
            messages=(*([{"role": "system", "content": system}] if system else []), *messages),
            tools=tools,
            tool_choice=choose_tool(tools, self.tool_choice),
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            template_options=thinking | ({"reasoning_effort": effort} if effort else {}),
            **fields,
        )


def _message(heading: AnswerHeader) -> dict[str, Any]:
    return {
        "id": heading.id_as("msg_"),
        "type": "message",
        "role": "assistant",
        "model": heading.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(0, 0),
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cache}


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls") or ()
    if thoughts := message.get("reasoning_content"):
        yield _block("reasoning", thoughts)
    if message.get("content") or not (calls or thoughts):
        yield _block("content", message.get("content") or "")
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments_object(arguments)}


def _block(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _stop_fields(answer: RecordedCompletion, asked: ChatBody) -> dict[str, str | None]:
    """Return why an answer ended. A stop string is not in its text, but in its tokens."""
    reason, stops = answer.completion.finish_reason, asked.sampling.get("stop")
    if stops and reason == "stop":
        ids = answer.completion.completion_ids or ()
        text = b"".join(answer.bytes_of(token) or b"" for token in ids).decode(errors="replace")
        if found := [stop for stop in stops if stop in text]:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(found, key=text.find)}
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


class _MessageStream(BlockStream):
    """A stream of the message's blocks."""

    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        yield _event("message_start", message=_message(heading))

    def open_block(self, kind: Kind) -> Iterator[Event]:
        yield _event("content_block_start", index=self.number, content_block=_block(kind, ""))

    def block_piece(self, kind: Kind, text: str) -> Iterator[Event]:
        field = "thinking" if kind == "reasoning" else "text"
        yield _event("content_block_delta", index=self.number, delta={"type": f"{field}_delta", field: text})

    def close_block(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        yield _event("content_block_stop", index=self.number)

    def calls(self, answer: RecordedCompletion) -> Iterator[Event]:
        for block in _blocks(answer.completion.message):
            if block["type"] == "tool_use":
                self.number += 1
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_start", index=self.number, content_block={**block, "input": {}})
                yield _event("content_block_delta", index=self.number, delta=delta)
                yield _event("content_block_stop", index=self.number)

    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage=reply["usage"])
        yield _event("message_stop")


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}


class MessagesDialect(Dialect):
    """`POST /messages`, for agents that use Anthropic's client."""

    stream = _MessageStream

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for blocks and tools that a chat cannot represent."""
        asked = validate_body(MessagesBody, body).request()
        check_conversation(asked.messages, asked.tools)
        return replace(asked, messages=self._memory.restore(asked.messages))

    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the `message` object."""
        [answer] = answers
        completion = answer.completion
        self._memory.add(completion.message)
        return _message(answer) | {
            "content": list(_blocks(completion.message)),
            **_stop_fields(answer, asked),
            "usage": _usage(completion.usage.prompt_tokens, completion.usage.completion_tokens),
        }

    @staticmethod
    def error(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
        """Return Anthropic's error object, which has no field for `param`; the message names it."""
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        # With this code, the SDK's `tool_runner` sends whole conversations. Here no server stores them.
        details = {"details": {"error_code": "thread_unsupported_request"}} if param == "thread" else {}
        if code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # Claude Code recognises these words.
        return {"type": "error", "error": {"type": kind, "message": message, **details}}
