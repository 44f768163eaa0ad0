"""Anthropic's messages, as agents speak it: requests in, answers out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.wire.bodies import check_conversation
from etude.wire.dialect import (
    ChatBody,
    Dialect,
    Event,
    Neutral,
    RecordedCompletion,
    RequestBody,
    arguments_object,
    arguments_text,
    tool_call,
    validated,
)
from etude.wire.forms import choose_tools, effort_options, only_one, read_format

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_THREAD = "thread.previous_message_id"


def _as_blocks(content: Any) -> Any:
    """Content in blocks; a text is short for one of them."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    """Whether later prompts have it is up to the model's template."""

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


_Texts: TypeAlias = Annotated[list[_Text], BeforeValidator(_as_blocks)]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    """May be left out, for a tool that returns nothing."""


_Block: TypeAlias = Annotated[
    _Text | _Thinking | _Redacted | _ToolUse | _ToolResult, Field(discriminator="type")
]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> _Message:
        wrong = (_ToolResult,) if self.role == "assistant" else (_Thinking, _Redacted, _ToolUse)
        for block in self.content:
            if isinstance(block, wrong):
                raise ValueError(f"a message of the role {self.role} has no {block.type}")
        return self

    def as_chat(self) -> Iterator[Message]:
        """The chat messages that stand for it: a user's results of tools are each a message of its own."""
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


class _Tool(BaseModel):
    """A tool of the agent's; those that the API runs are of other types."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def as_chat(self) -> Tool:
        """The tool in OpenAI's format."""
        described = {"description": self.description} if self.description else {}
        strict = {"strict": True} if self.strict else {}
        function = {"name": self.name, "parameters": self.input_schema or {}, **described, **strict}
        return {"type": "function", "function": function}


class _Thought(BaseModel):
    """A wish for thinking. A budget is a target that a model may miss, as it may with Anthropic's own."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None
    """Thoughts are no secret here, and not summarised either."""


class _Thread(BaseModel):
    """A conversation that the server keeps, so that requests have only what is new.

    The SDK's `tool_runner` asks for one. What a thread was created with, tools and system prompt, stays.
    """

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class _Output(BaseModel):
    """The form of an answer, and the effort to be made for it."""

    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(RequestBody):
    """The body of `POST /messages`."""

    free = frozenset(
        {
            *("metadata", "service_tier", "cache_control", "inference_geo", "speed"),
            *("user_profile_id", "workspace_id", "diagnostics"),
        }
    )
    neutral: ClassVar[Neutral] = {"mcp_servers": ([],), "context_management": ({}, {"edits": []})}

    messages: list[_Message] = Field(min_length=1)
    system: _Texts | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: _Thought | None = None
    thread: _Thread | None = None
    output_config: _Output | None = None
    output_format: dict[str, Any] | None = None
    """The older place of `output_config.format`."""
    stop: tuple[str, ...] | None = Field(default=None, alias="stop_sequences")

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> MessagesBody:
        if self.messages[-1].role == "assistant":
            raise ValueError("a model cannot go on in the middle of its answer here; end with a user message")
        return self

    def given(self) -> dict[str, Any]:
        """The parameters of sampling, the form of the answer among them."""
        output = self.output_config or _Output()
        forms = (
            read_format(output.format, "output_config.format"),
            read_format(self.output_format, "output_format"),
        )
        return super().given() | only_one(forms)

    def request(self) -> ChatBody:
        """The request, its system prompt as the first message."""
        system = _text(self.system or ())
        messages = [chat for message in self.messages for chat in message.as_chat()]
        effort = self.output_config.effort if self.output_config else None
        thinking = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}
        return replace(
            super().request(),
            messages=(*([{"role": "system", "content": system}] if system else []), *messages),
            tools=tuple(tool.as_chat() for tool in self.tools or ()),
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            template_options=thinking | effort_options(effort, "output_config.effort"),
        )


class MessagesDialect(Dialect):
    """`POST /messages`, for agents that are written for Anthropic's client."""

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for blocks and tools too that a chat has no place for."""
        known = validated(MessagesBody, body)
        asked = known.request()
        if known.thread is not None and known.thread.type == "continue":
            earlier = self._continued(known.thread.previous_message_id)
            asked = replace(asked, messages=(*earlier.messages, *asked.messages), tools=earlier.tools)
        check_conversation(asked.messages, asked.tools)
        asked = choose_tools(asked, known.tool_choice)
        return replace(asked, messages=self._memory.restored(asked.messages))

    def _continued(self, name: str | None) -> ChatBody:
        if name not in self._memory.threads:
            raise RequestError(
                f"thread.previous_message_id {name!r:.80} is no answer of this episode; send the whole "
                "conversation",
                param=_THREAD,
            )
        return self._memory.threads[name]

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `message` object."""
        completion = recorded.completion
        message, usage = completion.message, completion.usage
        self._memory.add(message)
        name = f"msg_{recorded.id.removeprefix('chatcmpl-')}"
        if body.get("thread"):
            self._memory.threads[name] = replace(asked, messages=(*asked.messages, message))
        calls = message.get("tool_calls") or ()
        blocks: list[dict[str, Any]] = []
        if thoughts := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if message.get("content") or not calls:
            blocks.append({"type": "text", "text": message.get("content") or "", "citations": None})
        for call in calls:
            function = call["function"]
            use = {"name": function["name"], "input": arguments_object(function["arguments"])}
            blocks.append({"type": "tool_use", "id": call["id"], **use})
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": recorded.model,
            "content": blocks,
            "stop_reason": _STOP_REASONS.get(completion.finish_reason, "end_turn"),
            "stop_sequence": None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def events(self, reply: dict[str, Any], asked: ChatBody) -> Iterator[Event]:
        """The message, block by block."""
        usage = reply["usage"]
        begun = {**reply, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield _event("message_start", message=begun)
        for index, block in enumerate(reply["content"]):
            if block["type"] == "text":
                empty = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            elif block["type"] == "thinking":
                empty = {**block, "thinking": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
        yield _event("message_stop")

    @staticmethod
    def error(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
        """Anthropic's error object, which has no place for the field; the message names it."""
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        # By this the SDK knows to send the whole conversation.
        details = {"details": {"error_code": "thread_not_found"}} if param == _THREAD else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
