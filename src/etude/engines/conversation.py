"""Names of conversations, by which calls that begin alike go to one process or server."""

from __future__ import annotations

import hashlib

from etude.core.call import ChatRequest

FIRST_TOKENS = 256
"""Prompts with this many equal tokens at the start count as one conversation."""


def conversation_key(request: ChatRequest) -> str:
    """Return the conversation of a request: its episode, or else a digest of how it begins.

    The beginning is everything up to the first user message, or the first tokens of a prompt.
    """
    if request.conversation:
        return request.conversation
    if request.prompt is not None:
        return beginning_digest(request.prompt[:FIRST_TOKENS])
    count = next((at for at, each in enumerate(request.messages) if each.get("role") == "user"), 0)
    return beginning_digest(request.messages[: count + 1])


def beginning_digest(of: object) -> str:
    """Return a digest, by which conversations that begin alike share a name."""
    return hashlib.blake2b(repr(of).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
