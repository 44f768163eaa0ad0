"""Answers and their tokens with logprobs: read from an endpoint, and presented by an API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from etude.core.call import Completion, Delta, Token, TopLogprobs
from etude.core.errors import ImpossibleCall
from etude.core.message import message_text

_NAMED = "token_id:"
"""vLLM's prefix for a token that is named by its id."""

_ROUNDING = 1e-4
"""Rounding error by which a logprob may exceed 0. In single precision, a logit minus a log-sum (both about
30) is off by a few times 2e-6. Servers that compute in lower precision are off by more."""
_LEAST = -1e5
"""Lowest logprob of a sampled token: OpenAI and vLLM write -9999 for probability 0."""
_LARGEST_ID = 2**31 - 1


class BadAnswer(ValueError):
    """An impossible value in an answer; the text names its field."""


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


def require_logprobs(values: Sequence[Any], field: str, least: float = _LEAST) -> tuple[float, ...]:
    """Return the logprobs in a list of an answer. Raises Impossible for an invalid value.

    `field` is the name of the values' field, with `#` for their index.
    """
    for index, value in enumerate(values):
        if type(value) not in (float, int) or value == -math.inf or not least <= value <= _ROUNDING:
            bound = "" if least == -math.inf else f", and not below {least:g}"
            where = field.replace("#", str(index))
            raise BadAnswer(f"{where} is {value!r:.40}; a logprob is a number of at most 0{bound}")
    return tuple(map(float, values))


def require_ids(ids: Sequence[Any], vocabulary: int | None, field: str) -> tuple[int, ...]:
    """Return the token ids in a list of an answer. Raises Impossible for an id outside the vocabulary.

    `field` is the name of the ids' field.
    """
    most = _LARGEST_ID if vocabulary is None else vocabulary - 1
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= most):
        return tuple(ids)
    index, wrong = next((at, id) for at, id in enumerate(ids) if type(id) is not int or not 0 <= id <= most)
    size = "" if vocabulary is None else f"; the vocabulary has {vocabulary} tokens"
    raise BadAnswer(f"{field}[{index}] is {wrong!r:.40}, which is not a token id{size}")


def named_ids(tokens: Any) -> tuple[int, ...] | None:
    """Return the ids of tokens like `token_id:42`, or None if the tokens are named by their text."""
    named = [_token(str(token.get("token", ""))) for token in tokens]
    ids = tuple([token for token in named if isinstance(token, int)])
    return ids if ids and len(ids) == len(named) else None


def token_texts(tokens: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the text of each token, or nothing if the endpoint gives no texts."""
    texts = tuple([str(token.get("token", "")) for token in tokens])
    return texts if any(texts) else ()


def read_tops(tokens: Sequence[Mapping[str, Any]], count: int) -> tuple[TopLogprobs, ...]:
    """Return each token's likeliest alternatives, by id if named so, or nothing if there are none."""
    tops = [token.get("top_logprobs") or () for token in tokens]
    if not any(tops):
        return ()
    read: list[TopLogprobs] = []
    for index, top in enumerate(tops):
        field = f"choices[0].logprobs.content[{index}].top_logprobs[#].logprob"
        values = require_logprobs([each["logprob"] for each in top], field, -math.inf)
        names = [_token(str(each["token"])) for each in top]
        # vLLM adds the sampled token if it is not among the likeliest.
        read.append(tuple(sorted(zip(names, values, strict=True), key=lambda pair: -pair[1])[:count]))
    return tuple(read)


def _token(name: str) -> Token:
    number = name.removeprefix(_NAMED)
    return int(number) if number != name and number.isdecimal() else name


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
