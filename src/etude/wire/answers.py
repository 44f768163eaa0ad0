"""Answers and their tokens with logprobs, as an API presents them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.core.call import Completion, Delta, Token, TopLogprobs
from etude.core.errors import ImpossibleCall
from etude.core.message import message_text


def require_asked(completion: Completion, *, logprobs: bool = False, top: int = 0) -> None:
    """Raise ImpossibleCall for the first requested field that is missing; empty answers need no logprobs."""
    if completion.usage.completion_tokens == 0:
        return
    if top and not completion.top_logprobs:
        missing = "top_logprobs"
    elif logprobs and completion.logprobs is None:
        missing = "logprobs"
    else:
        return
    raise ImpossibleCall(
        f"the answer lacks what {missing} asks for; leave it out of the request or the config, or use an "
        "endpoint that returns it",
        param=missing,
    )


TokenBytes: TypeAlias = Callable[[int], bytes | None]
"""Returns the bytes of a token, or None if its tokenizer is not available here."""

TokenLogprob: TypeAlias = tuple[Token, float, TopLogprobs]
"""A sampled token, its logprob, and the likeliest tokens with theirs."""


_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """The facts about an answer that are known before its first token."""

    id: str
    model: str
    bytes_of: TokenBytes = lambda token: None
    tokens_as_ids: bool = False
    """Whether logprobs name tokens by their ids; tokens without known bytes are always named so."""

    def id_as(self, prefix: str) -> str:
        """Return the id with an API's prefix for a kind of object."""
        return prefix + self.id.removeprefix("chatcmpl-")

    def token_name(self, token: Token) -> str:
        """Return a token's name: its text, or vLLM's `token_id:7`."""
        if isinstance(token, str):
            return token
        if token < 0:
            return ""
        known = None if self.tokens_as_ids else self.bytes_of(token)
        return f"token_id:{token}" if known is None else known.decode(errors="replace")

    def bytes(self, token: Token) -> list[int] | None:
        """Return a token's bytes, however it is named, or None if they are unknown."""
        if isinstance(token, int):
            known = self.bytes_of(token) if token >= 0 else None
        else:
            # An endpoint without ids writes a replacement character for part of a character.
            known = None if _REPLACEMENT in token else token.encode()
        return None if known is None else [*known]

    def with_completion(self, completion: Completion) -> RecordedCompletion:
        """Return the answer with this heading."""
        return RecordedCompletion(
            self.id, self.model, self.bytes_of, self.tokens_as_ids, completion=completion
        )


@dataclass(frozen=True, slots=True)
class RecordedCompletion(AnswerHeader):
    """A recorded completion, as an API presents it."""

    completion: Completion = field(kw_only=True)

    @property
    def tokens(self) -> list[TokenLogprob]:
        """The sampled tokens with their logprobs; none if the engine does not give them."""
        return list_tokens(self.completion)


def list_tokens(source: Completion | Delta) -> list[TokenLogprob]:
    """Return the tokens of an answer or a piece of it, each with its logprob and alternatives."""
    ids: Sequence[Token] | None
    if isinstance(source, Completion):
        ids, tops = source.completion_ids, source.top_logprobs
        # An endpoint may give logprobs without token ids.
        ids = (source.token_texts or None) if ids is None else ids
    else:
        ids, tops = source.ids, source.top
    logprobs = source.logprobs or ()
    ids = ids if ids is not None else (-1,) * len(logprobs)
    tops = tops or ((),) * len(logprobs)
    return list(zip(ids, logprobs, tops, strict=False))


@dataclass(slots=True)
class StreamProgress:
    """The part of an answer that a stream has sent."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0
    """Number of tokens received, sent or waiting."""
    waiting: list[TokenLogprob] = field(default_factory=list)
    """Tokens whose text has not been sent yet."""

    def take(self, delta: Delta) -> None:
        """Record a piece."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.tokens += len(delta.ids)
        self.waiting += list_tokens(delta)

    def take_rest(self, completion: Completion) -> Delta:
        """Record the end of the answer, and return the text that has not been sent."""
        message, tokens = completion.message, list_tokens(completion)
        self.waiting += tokens[self.tokens :]
        self.tokens = len(tokens)
        content = unsent_text(message_text(message), self.content)
        reasoning = unsent_text(message.get("reasoning_content") or "", self.reasoning)
        self.content, self.reasoning = self.content + content, self.reasoning + reasoning
        return Delta(content, reasoning)

    def take_waiting(self) -> list[TokenLogprob]:
        """Remove and return the waiting tokens."""
        tokens, self.waiting = self.waiting, []
        return tokens


def unsent_text(text: str, given: str) -> str:
    """Return the part of a text after its sent beginning `given`; empty if it does not begin so."""
    return text[len(given) :] if text.startswith(given) else ""
