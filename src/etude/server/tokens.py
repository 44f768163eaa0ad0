"""Tokens on the wire: logprobs as the two APIs present them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from etude.inference.engine import SampledToken

_LOWEST = -9999.0
"""What the API says in place of minus infinity, which JSON does not have."""
_REPLACEMENT = "\ufffd"

Name = Callable[[int], str]
"""A token's text, or `token_id:7` where the request wants that."""


def chat_logprobs(tokens: Sequence[SampledToken], name: Name) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice."""
    content = [
        _entry(token.id, token.logprob, name)
        | {"top_logprobs": [_entry(one, logprob, name) for one, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[SampledToken], name: Name, offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `offset` is where its text begins."""
    texts = [name(token.id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "text_offset": offsets,
        "top_logprobs": [{name(one): _finite(value) for one, value in token.top} for token in tokens],
    }


def namer(decode: Callable[[Sequence[int]], str], *, as_ids: bool) -> Name:
    """How tokens are named."""
    return (lambda token: f"token_id:{token}") if as_ids else (lambda token: decode([token]))


def _entry(token: int, logprob: float, name: Name) -> dict[str, Any]:
    text = name(token)
    # A token that is a part of a character has no text of its own, and so none to give the bytes of.
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": None if _REPLACEMENT in text else list(text.encode()),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
