"""OpenAI's completions: prompts as they stand, without a chat template."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from etude.core.call import Delta, Token, TopLogprobs
from etude.wire.answers import Heading, RecordedCompletion, Said, TokenLogprob
from etude.wire.bodies import CompletionBody
from etude.wire.chat import ChatDialect, ChunkStream, finite, ids_of, prompt_logprobs_object, usage_of
from etude.wire.dialect import ChatBody, Dialect, Event, Stream, validated

_REPLACEMENT = "\ufffd"


class CompletionsDialect(Dialect):
    """`POST /completions`: an answer for each prompt and repetition."""

    error_event = None
    names: ClassVar[Mapping[str, Sequence[str]]] = {**ChatDialect.names, "messages": ("prompt",)}

    def parse(self, body: Any) -> ChatBody:
        """Read a request, which may leave the model to the episode."""
        return validated(CompletionBody, body, model="").request()

    def reply(
        self, answers: Sequence[RecordedCompletion], asked: ChatBody, body: Any, created: int
    ) -> dict[str, Any]:
        """The `text_completion` object."""
        choices = []
        for index, answer in enumerate(answers):
            completion = answer.completion
            text, reason = str(completion.message["content"]), completion.finish_reason
            choice = _choice(asked, index, answer, answer.prompt_text + text, answer.tokens, reason)
            if asked.echo and asked.logprobs:
                choice["logprobs"] = _with_prompt(answer, choice["logprobs"])
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = prompt_logprobs_object(answer)
            if asked.return_token_ids:
                choice["prompt_token_ids"] = completion.prompt_ids
            choices.append(choice)
        return {
            "id": _id(answers[0]),
            "object": "text_completion",
            "created": created,
            "model": answers[0].model,
            "choices": choices,
            "usage": usage_of(answers, asked),
        }

    def stream(self, asked: ChatBody, body: Any, created: int) -> Stream:
        """Pieces of `text_completion` objects."""
        return _TextStream(asked, created)


class _TextStream(ChunkStream):
    kind = "text_completion"

    def add(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        said = self._said(index, heading)
        offset = len(said.content)
        said.take(delta)
        if delta.content:
            yield self._piece(index, heading, delta.content, offset)

    def finish(self, index: int, answer: RecordedCompletion) -> Iterator[Event]:
        said, completion = self._said(index, answer), answer.completion
        offset = len(said.content)
        rest = said.take_rest(completion).content
        yield self._piece(index, answer, rest, offset, completion.finish_reason)

    def _said(self, index: int, heading: Heading) -> Said:
        if not self.said:
            self.begin(Heading(_id(heading), heading.model))
        return self.said.setdefault(index, Said())

    def _piece(
        self, index: int, heading: Heading, text: str, offset: int, reason: str | None = None
    ) -> Event:
        tokens = self.said[index].taken()
        return self.chunk(_choice(self.asked, index, heading, text, tokens, reason, offset))


def _id(heading: Heading) -> str:
    return f"cmpl-{heading.id.removeprefix('chatcmpl-')}"


def _choice(
    asked: ChatBody,
    index: int,
    heading: Heading,
    text: str,
    tokens: Sequence[TokenLogprob],
    finish_reason: str | None,
    offset: int = 0,
) -> dict[str, Any]:
    """A choice, or a piece of it whose text begins at `offset`."""
    logprobs = _logprobs(heading, tokens, offset) if asked.logprobs else None
    choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
    return choice | ({"token_ids": ids_of(tokens)} if asked.return_token_ids else {})


def _logprobs(heading: Heading, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    texts = [_name(heading, token) for token, _, _ in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [finite(logprob) for _, logprob, _ in tokens],
        "text_offset": [*accumulate(_lengths(heading, tokens), initial=offset)][:-1],
        "top_logprobs": [_by_name(heading, top) for _, _, top in tokens],
    }


def _name(heading: Heading, token: Token) -> str:
    """A token's name; `bytes:\\xf0\\x9f` for a part of a character, as the API has no field for its bytes."""
    name, bytes = heading.called(token), heading.bytes(token)
    if _REPLACEMENT not in name or bytes is None or name.encode() == bytearray(bytes):
        return name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes)


def _by_name(heading: Heading, top: TopLogprobs) -> dict[str, float]:
    """The likeliest tokens; a second one of the same text is named by its id."""
    named: dict[str, float] = {}
    for token, logprob in top:
        name = _name(heading, token)
        named[name if name not in named else f"token_id:{token}"] = finite(logprob)
    return named


def _lengths(heading: Heading, tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """The characters that each token adds to the text."""
    decoder = getincrementaldecoder("utf-8")("replace")
    for token, _, _ in tokens:
        bytes = heading.bytes(token)
        yield len(heading.called(token) if bytes is None else decoder.decode(bytearray(bytes)))


def _with_prompt(answer: RecordedCompletion, own: dict[str, Any]) -> dict[str, Any]:
    """The logprobs of the prompt's tokens before the answer's own; of the first nothing is known."""
    completion = answer.completion
    first, *rest = completion.prompt_ids or ()
    tokens = list(zip(rest, completion.prompt_logprobs, completion.prompt_top, strict=True))
    before = _logprobs(answer, [(first, 0.0, ()), *tokens], 0)
    before["token_logprobs"][0] = before["top_logprobs"][0] = None
    both = {name: before[name] + own[name] for name in own}
    every = [(first, 0.0, ()), *tokens, *answer.tokens]
    return both | {"text_offset": [*accumulate(_lengths(answer, every), initial=0)][:-1]}
