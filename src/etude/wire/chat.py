"""OpenAI's chat completions, and its completions of raw prompts, with vLLM's additions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, model_validator

from etude.core.call import Delta, Token
from etude.core.errors import RequestError
from etude.core.message import Message, Tool, message_text
from etude.wire.dialect import (
    AnswerHeader,
    ChatBody,
    Dialect,
    Event,
    RecordedCompletion,
    Stream,
    TokenLogprob,
)
from etude.wire.request_body import (
    FORM_FIELDS,
    Effort,
    Flag,
    FormFields,
    Integer,
    Neutral,
    RequestBody,
    Wish,
    check_conversation,
    choose_tool,
    validate_body,
    without_unset,
)

_MOST_ANSWERS = 4096
"""Maximum number of answers to one request."""

TokenIds: TypeAlias = list[Annotated[int, Field(ge=0, strict=True)]]


class StreamOptions(BaseModel, extra="forbid"):
    """Options of a stream. Usage comes at its end; its pieces are not padded to hide their length."""

    include_usage: Flag = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class InferenceBody(RequestBody, FormFields):
    """The parameters that chat completions and completions share."""

    neutral: ClassVar[Neutral] = {
        **RequestBody.neutral,
        "modalities": (["text"],),
        "skip_special_tokens": (False,),
        # Only tokenizers of another kind offer a choice.
        "spaces_between_special_tokens": (True, False),
    }

    model: str
    n: Integer | None = Field(default=None, ge=1, le=128)
    return_token_ids: Flag | None = Field(default=None, description="vLLM: return token ids as well.")
    return_tokens_as_token_ids: Flag | None = Field(
        default=None, description="vLLM: name the tokens of logprobs by their ids, `token_id:7`."
    )

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters and the answer's constraint. Raises RequestError for two."""
        return super().given_values() | self.constraint()

    def request(self, **fields: Any) -> ChatBody:
        """Return the request without its prompts."""
        shared = {
            "n": self.n or 1,
            "return_token_ids": bool(self.return_token_ids),
            "tokens_as_ids": bool(self.return_tokens_as_token_ids),
        }
        return super().request(**shared | fields)


class ChatCompletionBody(InferenceBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Wish | None = Field(
        default=None, description="`auto`, `none`, `required`, or a function by its name."
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
    def _is_a_conversation(self) -> Self:
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
        tools = tuple(self.tools or ())
        return super().request(
            messages=tuple(map(without_unset, self.messages)),
            tools=tools,
            tool_choice=choose_tool(tools, self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_options=effort | (self.chat_template_kwargs or {}),
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            **fields,
        )


class CompletionBody(InferenceBody):
    """The body of `POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds] = Field(min_length=1)
    stream: Literal[False] | None = None
    logprobs: Integer | None = Field(default=None, ge=0, le=20)

    def given_values(self) -> dict[str, Any]:
        """Return the sampling parameters. The API's default is 16 tokens."""
        return {"max_tokens": 16} | super().given_values()

    def request(self, **fields: Any) -> ChatBody:
        """Return the request with its prompts, which are texts or token ids."""
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
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


def _choice(index: int, answer: RecordedCompletion, asked: ChatBody) -> dict[str, Any]:
    completion = answer.completion
    has_logprobs = asked.logprobs and completion.logprobs is not None
    choice = {
        "index": index,
        "message": {"content": None} | completion.message | {"role": "assistant"},
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs_object(answer.tokens, answer) if has_logprobs else None,
    }
    return choice | ({"token_ids": completion.completion_ids} if asked.return_token_ids else {})


class _ChatStream(Stream):
    """A stream of `chat.completion.chunk` objects, with the usage at its end if requested."""

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self._head: dict[str, Any] = {"object": "chat.completion.chunk", "created": asked.created}

    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        if len(self.said) == 1:  # All chunks have the id of the answer that starts first.
            self._head = {"id": heading.id_as("chatcmpl-"), "model": heading.model} | self._head
        more = {"prompt_token_ids": prompt_ids} if self.asked.return_token_ids else {}
        name, chunk = self._piece(index, heading, {"role": "assistant", "content": ""})
        yield name, chunk | more

    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        if self.asked.include_usage:
            yield None, {**self._head, "choices": [], "usage": reply["usage"]}
        yield None, "[DONE]"

    def pieces(self, index: int, heading: AnswerHeader, delta: Delta) -> Iterator[Event]:
        if fields := _text_fields(delta):
            yield self._piece(index, heading, fields)

    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        completion = answer.completion
        said, message = self.said[index], completion.message
        fields = _text_fields(rest)
        spoken = ("role", "content", "tool_calls", "reasoning_content")
        fields |= {name: value for name, value in message.items() if name not in spoken}
        calls = message.get("tool_calls") or ()
        if fields or (said.waiting and not calls):
            yield self._piece(index, answer, fields)
        for number, call in enumerate(calls):
            yield self._piece(index, answer, {"tool_calls": [{"index": number, **call}]})
        yield self._piece(index, answer, {}, completion.finish_reason)

    def _piece(
        self, index: int, heading: AnswerHeader, delta: dict[str, Any], finish_reason: str | None = None
    ) -> Event:
        """Return a chunk with the tokens of its text."""
        said = self.said[index]
        tokens, said.waiting = said.waiting, []
        logprobs = _logprobs_object(tokens, heading) if tokens and self.asked.logprobs else None
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        if self.asked.return_token_ids:
            choice["token_ids"] = [token for token, _, _ in tokens if isinstance(token, int)]
        usage: dict[str, Any] = {"usage": None} if self.asked.include_usage else {}
        return None, {**self._head, "choices": [choice], **usage}


def _text_fields(delta: Delta) -> dict[str, Any]:
    thinking = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    return thinking | ({"content": delta.content} if delta.content else {})


def _total_usage(answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, int]:
    """Return OpenAI's `usage` of answers; a prompt with several answers is counted once."""
    prompts = sum(answer.completion.usage.prompt_tokens for answer in answers[:: asked.n])
    sampled = sum(answer.completion.usage.completion_tokens for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def _logprobs_object(tokens: Iterable[TokenLogprob], heading: AnswerHeader) -> dict[str, Any]:
    """Return the `logprobs` of a choice."""

    def entry(token: Token, logprob: float) -> dict[str, Any]:
        name, bytes = heading.token_name(token), heading.bytes(token)
        return {"token": name, "logprob": _finite(logprob), "bytes": bytes}

    content = []
    for token, logprob, top in tokens:
        sampled = entry(token, logprob)
        sampled["top_logprobs"] = [entry(*other) for other in top] if top else []
        content.append(sampled)
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    """Return the logprob, with the API's -9999 for minus infinity, which JSON does not have."""
    return max(logprob, -9999.0)


class ChatDialect(Dialect):
    """`POST /chat/completions`: messages are not translated, so answers need not be remembered."""

    error_event = None
    stream = _ChatStream
    names: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(
        ("response_format", "structured_outputs"), FORM_FIELDS
    )

    def parse(self, body: Any) -> ChatBody:
        """Read a chat completion request, which may leave the model to the episode."""
        return validate_body(ChatCompletionBody, body, model="").request()

    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        first = answers[0].completion
        reply = {
            "id": answers[0].id_as("chatcmpl-"),
            "object": "chat.completion",
            "created": asked.created,
            "model": answers[0].model,
            "choices": [_choice(index, answer, asked) for index, answer in enumerate(answers)],
            "usage": _total_usage(answers, asked),
        }
        return reply | ({"prompt_token_ids": first.prompt_ids} if asked.return_token_ids else {})


class CompletionsDialect(Dialect):
    """`POST /completions`: one answer for each prompt and repetition, without streams."""

    names: ClassVar[Mapping[str, Sequence[str]]] = {**ChatDialect.names, "messages": ("prompt",)}

    def parse(self, body: Any) -> ChatBody:
        """Read a request, which may leave the model to the episode."""
        return validate_body(CompletionBody, body, model="").request()

    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the `text_completion` object."""
        choices = []
        for index, answer in enumerate(answers):
            completion = answer.completion
            choice: dict[str, Any] = {
                "index": index,
                "text": message_text(completion.message),
                "finish_reason": completion.finish_reason,
                "logprobs": None,
            }
            if asked.logprobs:
                tops = []
                for _, _, top in answer.tokens:
                    named: dict[str, float] = {}
                    for token, logprob in top:
                        # A second token with the same text is named by its id.
                        name = answer.token_name(token)
                        named[name if name not in named else f"token_id:{token}"] = _finite(logprob)
                    tops.append(named)
                choice["logprobs"] = {
                    "tokens": [answer.token_name(token) for token, _, _ in answer.tokens],
                    "token_logprobs": [_finite(logprob) for _, logprob, _ in answer.tokens],
                    "top_logprobs": tops,
                }
            if asked.return_token_ids:
                choice["prompt_token_ids"] = completion.prompt_ids
                choice["token_ids"] = completion.completion_ids
            choices.append(choice)
        return {
            "id": answers[0].id_as("cmpl-"),
            "object": "text_completion",
            "created": asked.created,
            "model": answers[0].model,
            "choices": choices,
            "usage": _total_usage(answers, asked),
        }
