"""OpenAI's Responses API for agents: requests in, answers out.

Its tools may be in namespaces; Codex offers its tools so. A chat has no namespaces: a function in one is
offered as `namespace__function`, and calls of it get both names back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from etude.core.errors import RequestError
from etude.core.message import Message, Tool, tool_call
from etude.wire.dialect import (
    AnswerHeader,
    BlockStream,
    ChatBody,
    Dialect,
    Event,
    Kind,
    RecordedCompletion,
    as_parts,
)
from etude.wire.request_body import (
    BOOKKEEPING,
    Effort,
    Flag,
    Format,
    Integer,
    Neutral,
    RequestBody,
    Wish,
    check_conversation,
    choose_tool,
    validate_body,
)

_REPEATED = ("instructions", "previous_response_id", "temperature", "top_p", "max_output_tokens", "reasoning")
"""Request fields that the response repeats."""


def _as_items(value: Any) -> Any:
    """Return the input as items: text is a user message, and items without a type are messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message"} | item if isinstance(item, dict) else item for item in value]


class _FunctionTool(BaseModel, extra="forbid"):
    """A function that the agent runs, that is always visible, and that only the model calls."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def as_chat(self, namespace: str | None = None) -> list[Tool]:
        """Return the tool in the format of chat completions."""
        shown = self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        return [{"type": "function", "function": {"name": _chat_name(self.name, namespace), **shown}}]


class _Namespace(BaseModel, extra="forbid"):
    """Functions under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[_FunctionTool]

    def as_chat(self) -> list[Tool]:
        """Return its functions, named by namespace and function."""
        return [chat for tool in self.tools for chat in tool.as_chat(self.name)]


def _chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function in a chat."""
    return f"{namespace}__{name}" if namespace else name


class _Part(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Parts: TypeAlias = Annotated[list[_Part], BeforeValidator(as_parts)]


class _Message(BaseModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _Call(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class _CallOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


class _ReasoningPart(BaseModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Reasoning(BaseModel):
    """Thoughts of an earlier answer; the model's template decides whether later prompts have them."""

    type: Literal["reasoning"]
    content: list[_ReasoningPart] | None = None


_Item: TypeAlias = Annotated[_Message | _Call | _CallOutput | _Reasoning, Field(discriminator="type")]


class _TextConfig(BaseModel, extra="forbid"):
    """The format of an answer. Verbosity is a setting of OpenAI's own models and has no effect here."""

    format: Format = None
    verbosity: str | None = None


class _ReasoningConfig(BaseModel, extra="forbid"):
    """Reasoning settings. Thoughts are returned whole; the template decides which ones later turns have."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto"] | None = None


class ResponsesBody(RequestBody):
    """The body of `POST /responses`."""

    free = (BOOKKEEPING - {"store"}) | {"client_metadata"}
    neutral: ClassVar[Neutral] = {
        **RequestBody.neutral,
        "background": (False,),
        "truncation": ("disabled",),
        "context_management": ([],),
        "stream_options": ({"include_obfuscation": False}, {}),
    }

    input: Annotated[list[_Item], BeforeValidator(_as_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    tools: list[Annotated[_FunctionTool | _Namespace, Field(discriminator="type")]] | None = None
    tool_choice: Wish | None = None
    parallel_tool_calls: Flag | None = None
    text: _TextConfig | None = None
    reasoning: _ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Flag | None = None
    max_tokens: Integer | None = Field(default=None, alias="max_output_tokens", ge=1)

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters, with the answer's constraint."""
        form = self.text and self.text.format
        return super().given_values() | ({"constraint": form} if form else {})

    def request(self, **fields: Any) -> ChatBody:
        """Return the request, with its instructions as the first message."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked = self.reasoning.effort if self.reasoning else None
        effort = {"reasoning_effort": asked} if asked else {}
        tools = tuple(chat for tool in self.tools or () for chat in tool.as_chat())
        return super().request(
            messages=(*first, *_messages(self.input)),
            tools=tools,
            tool_choice=choose_tool(tools, self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_options=effort | (self.chat_template_kwargs or {}),
            **fields,
        )


def _messages(items: Iterable[_Item]) -> list[Message]:
    """Convert the input to chat messages; items of one assistant turn become one message."""
    messages: list[Message] = []
    is_open = False
    thoughts = ""
    for item in items:
        if isinstance(item, _Reasoning):
            # Thoughts belong to the turn that follows them.
            thoughts, is_open = "".join(part.text for part in item.content or ()), False
            continue
        by_assistant = isinstance(item, _Call) or (isinstance(item, _Message) and item.role == "assistant")
        if by_assistant and not is_open:
            thinking = {"reasoning_content": thoughts} if thoughts else {}
            messages.append({"role": "assistant", "content": None, **thinking})
        is_open, thoughts = by_assistant, ""
        if isinstance(item, _Call):
            call = tool_call(item.call_id, _chat_name(item.name, item.namespace), item.arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, _CallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif by_assistant:
            messages[-1]["content"] = (messages[-1]["content"] or "") + _text(item.content)
        else:
            messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _text(parts: Iterable[_Part]) -> str:
    return "".join(part.text for part in parts)


def _response(heading: AnswerHeader, asked: ChatBody) -> dict[str, Any]:
    """Return a response without output. Its id follows from the request, as the completion's does."""
    body = asked.body
    return {
        "id": heading.id_as("resp_"),
        "object": "response",
        "created_at": asked.created,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "model": heading.model,
        "output": [],
        "usage": None,
        **{field: body.get(field) for field in _REPEATED},
        "metadata": body.get("metadata") or {},
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls,
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": body.get("store") is not False,
    }


def _output(answer: RecordedCompletion, asked: ChatBody) -> Iterator[dict[str, Any]]:
    """Yield the items of a response: its thoughts, its text, and each tool call."""
    completion = answer.completion
    message = completion.message
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    text, calls = message.get("content"), message.get("tool_calls") or ()
    if thoughts := message.get("reasoning_content"):
        yield _item(answer, "reasoning", thoughts, status="completed" if text or calls else status)
    if text or not (calls or thoughts):
        yield _item(answer, "content", text or "", status=status)
    # The fields that name each function of a namespace in a call.
    names = {
        _chat_name(function["name"], tool["name"]): {"name": function["name"], "namespace": tool["name"]}
        for tool in asked.body.get("tools") or ()
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }
    for index, call in enumerate(calls):
        name = call["function"]["name"]
        yield {
            "type": "function_call",
            "id": f"{answer.id_as('fc_')}-{index}",
            "call_id": call["id"],
            **names.get(name, {"name": name}),
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }


def _item(heading: AnswerHeader, kind: Kind, text: str, *, status: str) -> dict[str, Any]:
    """Return an item with one part of text."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        item: dict[str, Any] = {"type": "reasoning", "id": heading.id_as("rs_"), "summary": []}
    else:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": heading.id_as("msg_"), "role": "assistant"}
    return {**item, "content": [part], "status": status}


class _ResponseStream(BlockStream):
    """A stream of the response's items, with numbered events."""

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self._events = count()
        self._heading = AnswerHeader("", "")

    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        self._heading = heading
        response = _response(heading, self.asked)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def open_block(self, kind: Kind) -> Iterator[Event]:
        item = _item(self._heading, kind, "", status="in_progress")
        yield self._event("response.output_item.added", output_index=self.number, item=item | {"content": []})
        yield self._part("response.content_part.added", item, part=item["content"][0])

    def block_piece(self, kind: Kind, text: str) -> Iterator[Event]:
        item = _item(self._heading, kind, "", status="in_progress")
        yield self._text_event(kind, "delta", item, delta=text)

    def close_block(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        item = _item(self._heading, kind, text, status=status)
        yield self._text_event(kind, "done", item, text=text)
        yield self._part("response.content_part.done", item, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=self.number, item=item)

    def _text_event(self, kind: Kind, name: str, item: dict[str, Any], **fields: Any) -> Event:
        if kind == "reasoning":
            return self._part(f"response.reasoning_text.{name}", item, **fields)
        return self._part(f"response.output_text.{name}", item, **fields, logprobs=[])

    def calls(self, answer: RecordedCompletion) -> Iterator[Event]:
        name = "response.function_call_arguments"
        for item in _output(answer, self.asked):
            if item["type"] == "function_call":
                self.number += 1
                at = {"output_index": self.number}
                begun = {**item, "status": "in_progress", "arguments": ""}
                call = {**at, "item_id": item["id"]}
                yield self._event("response.output_item.added", **at, item=begun)
                yield self._event(f"{name}.delta", **call, delta=item["arguments"])
                yield self._event(f"{name}.done", **call, name=item["name"], arguments=item["arguments"])
                yield self._event("response.output_item.done", **at, item=item)

    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        yield self._event(f"response.{reply['status']}", response=reply)

    def _part(self, name: str, item: dict[str, Any], **fields: Any) -> Event:
        at = {"output_index": self.number, "item_id": item["id"], "content_index": 0}
        return self._event(name, **at, **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        return type, {"type": type, "sequence_number": next(self._events), **fields}


class ResponsesDialect(Dialect):
    """`POST /responses`. A request continues from an earlier answer with `previous_response_id`."""

    stream = _ResponseStream

    names: ClassVar[Mapping[str, Sequence[str]]] = {
        "messages": ("input",),
        "response_format": ("text.format",),
        "reasoning_effort": ("reasoning.effort",),
        "max_tokens": ("max_output_tokens",),
    }

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for items and tools that a chat cannot represent."""
        known = validate_body(ResponsesBody, body)
        asked = known.request()
        name, head = known.previous_response_id, 1 if known.instructions else 0
        earlier = () if name is None else self._memory.conversation(name, "previous_response_id").messages
        messages = (*asked.messages[:head], *earlier, *self._memory.restore(asked.messages[head:]))
        if not messages:
            raise RequestError("input must hold at least one message, found none", param="input")
        try:
            check_conversation(messages, asked.tools)
        except RequestError as error:
            if not (error.param or "").startswith("messages"):
                raise
            raise RequestError(f"input: {error}", param="input") from error
        return replace(asked, messages=messages)

    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the `response` object, and store its conversation by its id."""
        [answer] = answers
        completion = answer.completion
        self._memory.add(completion.message)
        response = _response(answer, asked)
        # Instructions apply to one request; the API does not carry them over.
        own = asked.messages[1 if asked.body.get("instructions") else 0 :]
        if response["store"]:
            self._memory.keep(response["id"], replace(asked, messages=(*own, completion.message)))
        cut, usage = completion.finish_reason == "length", completion.usage
        return response | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(_output(answer, asked)),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
