"""Answers that are read and requests that are written without h11, held to what h11 makes of them."""

from __future__ import annotations

import h11
import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.inference.plain_http import PostHead, usual_head

HEAD = b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Type:application/json \r\ncontent-length: 3\r\n\r\n"

pieces = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 \r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 404 No\r\n"),
        *(b"HTTP/1.1 200 \xe9\r\n", b"HTTP/1.1 200\r\n", b"HTTP/1.1 103 Early\r\n", b"HTTP/1.1 2000 OK\r\n"),
        *(b"content-length: 3\r\n", b"Content-Length:0\r\n", b"content-length:  2 \r\n"),
        *(b"content-length: 3, 3\r\n", b"content-length: +3\r\n", b"content-length: 03\r\n"),
        *(b"content-length: \r\n", b"content-length: 99\r\n", b"content-length: 1\t\r\n"),
        *(b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"content-encoding: gzip\r\n"),
        *(b"x: a:b\r\n", b"X-Own:\r\n", b"x : a\r\n", b" folded\r\n", b"y: \xff\r\n", b"z: a\x00\r\n"),
        *(b"no colon\r\n", b": no name\r\n", b"lines: end\n", b"q:\tv\r\n", b"date: now\r\n"),
        *(b"\r\n", b"\n", b"abc", b"ab", b"\r\nabc", b"\r\nabcd", b""),
    ]
)


def by_h11(received: bytes) -> tuple[dict[str, str], bytes] | None:
    """Headers and body of a whole answer of status 200, after which the connection can be used again."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(received)
    try:
        answer, content = connection.next_event(), b""
        if not isinstance(answer, h11.Response) or answer.status_code != 200:
            return None
        while isinstance(event := connection.next_event(), h11.Data):
            content += event.data
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.EndOfMessage) or connection.their_state is not h11.DONE:
        return None
    return dict(httpx.Headers(answer.headers.raw_items())), content


@given(st.lists(pieces, max_size=8).map(b"".join))
@example(HEAD + b"abc")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n")
def test_a_usual_answer_is_h11s(received: bytes) -> None:
    found = usual_head(received, 50)
    if found is not None:
        headers, begin, end = found
        if end <= len(received):
            assert by_h11(received) == (headers, received[begin:end])
        else:
            assert by_h11(received + b"x" * (end - len(received))) is not None


def test_what_is_usual_is_read_without_h11() -> None:
    found = usual_head(HEAD + b"abc", 3)
    names = {"date": "now", "content-type": "application/json", "content-length": "3"}
    assert found == (names, len(HEAD), len(HEAD) + 3)
    assert usual_head(HEAD + b"abc", 2) is None


@pytest.mark.parametrize(
    "line",
    [
        *(b"Connection: keep-alive", b"Transfer-Encoding: chunked", b"Content-Encoding: gzip"),
        *(b"content-length: 3", b"date: then", b"a: \xe9", b" b", b"c", b"d : e", b"Upgrade: x", b"f:\tg"),
    ],
)
def test_what_is_not_is_left_to_h11(line: bytes) -> None:
    assert usual_head(HEAD.replace(b"Date: now", b"Date: now\r\n" + line) + b"abc", 3) is None


@pytest.mark.parametrize("head", [HEAD[:-2], HEAD.replace(b"200", b"201"), HEAD.replace(b" 3", b" x")])
def test_so_is_a_head_that_is_cut_or_of_another_kind(head: bytes) -> None:
    assert usual_head(head, 3) is None


@given(st.binary(min_size=1, max_size=99))
def test_a_request_is_written_as_h11_writes_it(content: bytes) -> None:
    url = httpx.URL("http://127.0.0.1:8000/v1/completions?a=%20b")
    head = PostHead(url, httpx.Headers({"accept-encoding": "gzip", "Authorization": "Bearer x", "a": "1"}))
    request, connection = head.request(content), h11.Connection(h11.CLIENT)
    event = h11.Request(method="POST", target=url.raw_path, headers=request.headers.raw)
    sent = [connection.send(each) or b"" for each in (event, h11.Data(data=content), h11.EndOfMessage())]
    assert head.is_usual
    assert head.with_body(content) == b"".join(sent)


@pytest.mark.parametrize(
    "own", [{"Connection": "close"}, {"expect": "100-continue"}, {"Content-Length": "1"}, {"a": "b\nc"}]
)
def test_a_request_with_a_word_about_the_connection_is_left_to_h11(own: dict[str, str]) -> None:
    assert not PostHead(httpx.URL("http://127.0.0.1/v1"), httpx.Headers(own)).is_usual
