"""Answers on their way from a model to an API: heading, tokens, and how much of them was given out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.core.call import Completion, Delta, Token, TopLogprobs
from etude.core.message import text_of

TokenBytes: TypeAlias = Callable[[int], bytes | None]
"""The bytes of a token; None where its tokenizer is not here."""

TokenLogprob: TypeAlias = tuple[Token, float, TopLogprobs]
"""A sampled token, its logprob, and the most likely ones with theirs."""


_REPLACEMENT = "\ufffd"


def _unknown(token: int) -> bytes | None:
    return None


@dataclass(frozen=True, slots=True)
class Heading:
    """The facts of an answer that are known before there is any."""

    id: str
    model: str
    bytes_of: TokenBytes = _unknown
    tokens_as_ids: bool = False
    """Whether the tokens of logprobs are called by their ids, as those without known bytes always are."""

    def called(self, token: Token) -> str:
        """A token's name: its text, or vLLM's `token_id:7`."""
        if isinstance(token, str):
            return token
        if token < 0:
            return ""
        known = None if self.tokens_as_ids else self.bytes_of(token)
        return f"token_id:{token}" if known is None else known.decode(errors="replace")

    def bytes(self, token: Token) -> list[int] | None:
        """A token's bytes, whatever it is called; None where they are not known."""
        if isinstance(token, int):
            known = self.bytes_of(token) if token >= 0 else None
        else:
            # An endpoint that tells no ids calls a part of a character by the sign for what is none.
            known = None if _REPLACEMENT in token else token.encode()
        return None if known is None else [*known]

    def recorded(self, completion: Completion) -> RecordedCompletion:
        """The answer that it is about."""
        return RecordedCompletion(
            self.id, self.model, self.bytes_of, self.tokens_as_ids, completion=completion
        )


@dataclass(frozen=True, slots=True)
class RecordedCompletion(Heading):
    """A completion that was recorded, as an API presents it."""

    completion: Completion = field(kw_only=True)
    prompt_text: str = field(default="", kw_only=True)
    """Where it is to be echoed."""

    @property
    def tokens(self) -> list[TokenLogprob]:
        """The sampled tokens with their logprobs; none where the engine cannot tell."""
        return tokens_of(self.completion)


def tokens_of(source: Completion | Delta) -> list[TokenLogprob]:
    """The tokens of an answer, or a piece of it, each with its logprob and the alternatives to it."""
    ids: Sequence[Token] | None
    if isinstance(source, Completion):
        ids, tops = source.completion_ids, source.top_logprobs
        # An endpoint may give logprobs without the tokens' ids.
        ids = (source.token_texts or None) if ids is None else ids
    else:
        ids, tops = source.ids, source.top
    logprobs = source.logprobs or ()
    ids = ids if ids is not None else (-1,) * len(logprobs)
    tops = tops or ((),) * len(logprobs)
    return list(zip(ids, logprobs, tops, strict=False))


@dataclass(slots=True)
class Said:
    """The part of one answer that a stream has given out."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0
    """Tokens that came, given out or waiting."""
    waiting: list[TokenLogprob] = field(default_factory=list)
    """Those whose text was not given out yet."""

    def take(self, delta: Delta) -> None:
        """Note a piece."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.tokens += len(delta.ids)
        self.waiting += tokens_of(delta)

    def take_rest(self, completion: Completion) -> Delta:
        """Note the end, and get what was not given out of the text."""
        message, tokens = completion.message, tokens_of(completion)
        self.waiting += tokens[self.tokens :]
        self.tokens = len(tokens)
        content = _after(text_of(message), self.content)
        reasoning = _after(message.get("reasoning_content") or "", self.reasoning)
        self.content, self.reasoning = self.content + content, self.reasoning + reasoning
        return Delta(content, reasoning)

    def taken(self) -> list[TokenLogprob]:
        """The tokens that waited."""
        tokens, self.waiting = self.waiting, []
        return tokens


def _after(text: str, given: str) -> str:
    return text[len(given) :] if text.startswith(given) else ""
