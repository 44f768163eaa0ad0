"""Requests and answers of plain HTTP/1.1 that need no parser: those of a server that says what is usual.

Whatever is not is left to h11, which takes as long for a head as all the rest of a request does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import h11
import httpx

_NUMBER = re.compile(rb"(?<=\r\nContent-Length: )1(?=\r\n)")
_OF_THE_CONNECTION = {"connection", "expect", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers that change how a request, or what comes after it, is sent or read."""
_OF_A_BODY = _OF_THE_CONNECTION | {"content-length"}
_USUAL_HEAD = re.compile(rb"HTTP/1\.1 200 [ -~]*\r\n((?:[A-Za-z0-9-]+:[ -~]*\r\n)+)\r\n")
_UNUSUAL = _OF_THE_CONNECTION | {"content-encoding"}


class HttpAnswer(Protocol):
    """A whole answer, by httpx or not."""

    @property
    def status_code(self) -> int:
        """The status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """To be asked by names in lower case."""

    @property
    def content(self) -> bytes:
        """The body, expanded where it was sent compressed."""


@dataclass(frozen=True, slots=True)
class GoodAnswer:
    """One of status 200."""

    headers: Mapping[str, str]
    content: bytes
    status_code: ClassVar[int] = 200


class PostHead:
    """The head of POST requests that differ in nothing but their bodies."""

    def __init__(self, url: httpx.URL, headers: httpx.Headers) -> None:
        self._url, self._headers = url, headers
        self._before, self._after = b"", b""
        self.is_usual = _OF_A_BODY.isdisjoint(headers) and self._is_written()
        """Whether it can be written without h11."""

    def _is_written(self) -> bool:
        example = self.request(b"1")
        try:
            head = h11.Request(method="POST", target=self._url.raw_path, headers=example.headers.raw)
        except h11.LocalProtocolError:
            return False  # And so h11 is left to say what is wrong.
        parts = _NUMBER.split(h11.Connection(h11.CLIENT).send(head) or b"")
        self._before, self._after = parts[0], parts[-1]
        return len(parts) == 2

    def with_body(self, content: bytes) -> bytes:
        """The bytes of a request, as h11 would write them."""
        return b"%b%d%b%b" % (self._before, len(content), self._after, content)

    def request(self, content: bytes) -> httpx.Request:
        """The same for h11, and for errors."""
        return httpx.Request("POST", self._url, headers=self._headers, content=content)


def usual_head(received: bytes, most: int) -> tuple[dict[str, str], int, int] | None:
    """The headers of an answer, by names in lower case, and where in `received` its body begins and ends.

    None for what is not usual: another status than 200, a head that is not complete or says anything about
    the connection, a body of unknown length, of more than `most` bytes or compressed, a header that comes
    twice, and whatever breaks a rule.
    """
    match = _USUAL_HEAD.match(received)
    if match is None:
        return None
    lines = match[1].decode("ascii").split("\r\n")[:-1]
    headers = {name.lower(): value.strip(" ") for name, _, value in [line.partition(":") for line in lines]}
    length = headers.get("content-length", "")
    if len(headers) != len(lines) or not length.isdigit() or not _UNUSUAL.isdisjoint(headers):
        return None
    size = int(length)
    return (headers, match.end(), match.end() + size) if size <= most else None
