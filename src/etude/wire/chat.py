"""OpenAI's chat completions, and its completions of raw prompts: requests in, answers out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from etude.core.call import Delta, Token, TopLogprobs
from etude.core.message import message_text
from etude.wire.answers import AnswerHeader, RecordedCompletion, TokenLogprob
from etude.wire.bodies import ChatCompletionBody, CompletionBody
from etude.wire.dialect import ChatBody, Dialect, Event, Stream
from etude.wire.forms import FORM_FIELDS
from etude.wire.sampling import validate_body


class ChatDialect(Dialect):
    """`POST /chat/completions`: messages are not translated, so answers need not be remembered."""

    error_event = None
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
            "usage": total_usage(answers, asked),
        }
        return reply | ({"prompt_token_ids": first.prompt_ids} if asked.return_token_ids else {})

    def stream(self, asked: ChatBody) -> Stream:
        """Return a stream of `chat.completion.chunk` objects."""
        return _ChatStream(asked)


def _choice(index: int, answer: RecordedCompletion, asked: ChatBody) -> dict[str, Any]:
    completion = answer.completion
    has_logprobs = asked.logprobs and completion.logprobs is not None
    choice = {
        "index": index,
        "message": {"content": None} | completion.message | {"role": "assistant"},
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs_object(answer.tokens, answer) if has_logprobs else None,
    }
    return choice | ({"token_ids": completion.completion_ids} if asked.return_token_ids else {})


class ChunkStream(Stream):
    """A stream of chunks of one kind, with the usage at its end if requested."""

    kind, prefix = "chat.completion.chunk", "chatcmpl-"

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self._head: dict[str, Any] = {"object": self.kind, "created": asked.created}

    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        """Take the id and model from the first answer that starts."""
        if len(self.said) == 1:
            self._head = {"id": heading.id_as(self.prefix), "model": heading.model} | self._head
        yield from ()

    def chunk(self, choice: dict[str, Any], **more: Any) -> Event:
        """Return a chunk with a piece of one choice."""
        usage: dict[str, Any] = {"usage": None} if self.asked.include_usage else {}
        return None, {**self._head, "choices": [choice], **usage, **more}

    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        """Yield the usage if requested, and `[DONE]`."""
        if self.asked.include_usage:
            yield None, {**self._head, "choices": [], "usage": reply["usage"]}
        yield None, "[DONE]"


class _ChatStream(ChunkStream):
    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        yield from super().begin(index, heading, prompt_ids)
        more = {"prompt_token_ids": prompt_ids} if self.asked.return_token_ids else {}
        name, chunk = self._piece(index, heading, {"role": "assistant", "content": ""})
        yield name, chunk | more

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
        tokens = self.said[index].take_waiting()
        logprobs = logprobs_object(tokens, heading) if tokens and self.asked.logprobs else None
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        ids = {"token_ids": known_ids(tokens)} if self.asked.return_token_ids else {}
        return self.chunk(choice | ids)


def _text_fields(delta: Delta) -> dict[str, Any]:
    thinking = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    return thinking | ({"content": delta.content} if delta.content else {})


def total_usage(answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, int]:
    """Return OpenAI's `usage` of answers; a prompt with several answers is counted once."""
    prompts = sum(answer.completion.usage.prompt_tokens for answer in answers[:: asked.n])
    sampled = sum(answer.completion.usage.completion_tokens for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def known_ids(tokens: Iterable[TokenLogprob]) -> list[int]:
    """Return the ids of tokens that have one."""
    return [token for token, _, _ in tokens if isinstance(token, int)]


def logprobs_object(tokens: Iterable[TokenLogprob], heading: AnswerHeader) -> dict[str, Any]:
    """Return the `logprobs` of a choice."""

    def entry(token: Token, logprob: float) -> dict[str, Any]:
        name, bytes = heading.token_name(token), heading.bytes(token)
        return {"token": name, "logprob": finite(logprob), "bytes": bytes}

    content = []
    for token, logprob, top in tokens:
        sampled = entry(token, logprob)
        sampled["top_logprobs"] = [entry(*other) for other in top] if top else []
        content.append(sampled)
    return {"content": content, "refusal": None}


def finite(logprob: float) -> float:
    """Return the logprob, with the API's -9999 for minus infinity, which JSON does not have."""
    return max(logprob, -9999.0)


class CompletionsDialect(Dialect):
    """`POST /completions`: one answer for each prompt and repetition."""

    error_event = None
    names: ClassVar[Mapping[str, Sequence[str]]] = {**ChatDialect.names, "messages": ("prompt",)}

    def parse(self, body: Any) -> ChatBody:
        """Read a request, which may leave the model to the episode."""
        return validate_body(CompletionBody, body, model="").request()

    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the `text_completion` object."""
        choices = []
        for index, answer in enumerate(answers):
            completion = answer.completion
            text, reason = message_text(completion.message), completion.finish_reason
            choice = _text_choice(asked, index, answer, text, answer.tokens, reason)
            if asked.return_token_ids:
                choice["prompt_token_ids"] = completion.prompt_ids
            choices.append(choice)
        return {
            "id": answers[0].id_as("cmpl-"),
            "object": "text_completion",
            "created": asked.created,
            "model": answers[0].model,
            "choices": choices,
            "usage": total_usage(answers, asked),
        }

    def stream(self, asked: ChatBody) -> Stream:
        """Return a stream of `text_completion` objects."""
        return _TextStream(asked)


class _TextStream(ChunkStream):
    kind, prefix = "text_completion", "cmpl-"

    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        yield from super().begin(index, heading, prompt_ids)
        if self.asked.return_token_ids:
            choice = _text_choice(self.asked, index, heading, "", (), None)
            yield self.chunk(choice | {"prompt_token_ids": prompt_ids})

    def pieces(self, index: int, heading: AnswerHeader, delta: Delta) -> Iterator[Event]:
        if delta.content:
            yield self._piece(index, heading, delta.content)

    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        yield self._piece(index, answer, rest.content, answer.completion.finish_reason)

    def _piece(self, index: int, heading: AnswerHeader, text: str, reason: str | None = None) -> Event:
        return self.chunk(
            _text_choice(self.asked, index, heading, text, self.said[index].take_waiting(), reason)
        )


def _text_choice(
    asked: ChatBody,
    index: int,
    heading: AnswerHeader,
    text: str,
    tokens: Sequence[TokenLogprob],
    finish_reason: str | None,
) -> dict[str, Any]:
    """Return a choice, or a piece of it."""
    logprobs = _logprobs(heading, tokens) if asked.logprobs else None
    choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
    return choice | ({"token_ids": known_ids(tokens)} if asked.return_token_ids else {})


def _logprobs(heading: AnswerHeader, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [heading.token_name(token) for token, _, _ in tokens],
        "token_logprobs": [finite(logprob) for _, logprob, _ in tokens],
        "top_logprobs": [_by_name(heading, top) for _, _, top in tokens],
    }


def _by_name(heading: AnswerHeader, top: TopLogprobs) -> dict[str, float]:
    """Map the likeliest tokens by name; a second token with the same text is named by its id."""
    named: dict[str, float] = {}
    for token, logprob in top:
        name = heading.token_name(token)
        named[name if name not in named else f"token_id:{token}"] = finite(logprob)
    return named
