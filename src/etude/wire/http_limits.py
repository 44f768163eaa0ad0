"""The limits of an HTTP server of Etude's, the same kinds at all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MEBIBYTE = 2**20

SLOWEST_BYTES = 32 * 1024
"""A body has a second more for each so many bytes that have come. Slower clients are given up."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server."""

    max_body: int = 32 * MEBIBYTE
    """Bytes of a request's body."""
    max_large_body: int = 32 * MEBIBYTE
    """Bytes of one to a path of `large_paths`."""
    large_paths: Collection[str] = frozenset()
    seconds: float = 30.0
    """For the head of a request from the connection's begin or the last answer to its end; for its body,
    beside what `SLOWEST_BYTES` adds; and for a client to take a piece of its answer."""
    connections: int = 1024
    """With a request, at once. Where there are so many, only those for `always_open` are not refused."""
    waiting: int = 1024
    """Beyond those, in case a request comes. Where there are so many, a new one takes the place of the one
    that has waited longest."""
    always_open: Collection[str] = frozenset({"/health"})
    """Paths that are answered all the same."""

    def max_body_of(self, path: str) -> int:
        """Bytes of the body of a request to a path."""
        return self.max_large_body if path.rstrip("/") in self.large_paths else self.max_body
