"""The common part of Etude's HTTP servers: sockets, request checks, keys, and error responses.

And the server that records the calls of agents in another process or language.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.core.errors import RequestError
from etude.core.process import allow_open_files
from etude.wire.dialect import AnswerMemory
from etude.wire.gateway import Gateway, Handler, Readers, find_dialect

if TYPE_CHECKING:
    import uvicorn


class ApiError(HTTPException):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """`param` is the wrong field; `retry_after` the seconds after which a retry may succeed."""
        headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def response(self, path: str = "") -> JSONResponse:
        """Return the response to a request for a path, in the format of its API."""
        content = find_dialect(path).error(
            self.status_code, str(self.detail), param=self.param, code=self.code
        )
        return JSONResponse(content, self.status_code, dict(self.headers or {}))


_LOG = logging.getLogger("etude.http")

USUAL_BODY = 32 * 2**20
"""Bytes that a request body may have."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Check = Callable[[Scope, Headers], None]
"""Raises ApiError for a request without access."""


@dataclass
class RequestChecks:
    """ASGI middleware that refuses requests, limits their bodies, and answers failures.

    A failure of the application becomes an error object and one line in the log.
    """

    app: ASGIApp
    check: Check | None = None
    max_body: Callable[[str], int] = lambda path: USUAL_BODY
    """Returns the maximum size in bytes of a request body, by path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_started, seen, limit = False, 0, self.max_body(scope["path"])

        async def receive_some() -> Message:
            """Receive a piece of the body, if not too large: clients need not declare the length."""
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            _check_size(seen, limit)
            return message

        async def send_on(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            headers = Headers(scope=scope)
            if self.check is not None:
                self.check(scope, headers)
            length = headers.get("content-length", "0")
            _check_size(int(length) if length.isdecimal() else 0, limit)
            if (encoding := headers.get("content-encoding", "identity")) != "identity":
                raise ApiError(415, f"the body is compressed ({encoding}); send it as plain JSON")
            await self.app(scope, receive_some, send_on)
            return
        except ApiError as error:
            answer = error
        except ClientDisconnect:
            _LOG.info("%s %s: the client left before its request was whole", scope["method"], scope["path"])
            return
        except Exception as error:  # noqa: BLE001  the client gets an error response for any failure
            _LOG.error("%s %s failed: %s", scope["method"], scope["path"], in_one_line(error))
            answer = ApiError(500, "the server failed to answer this request; its log has the reason")
        if not is_started:
            await answer.response(scope["path"])(scope, receive, send)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        # uvicorn reads and drops the rest of the body, so that the client can read the answer.
        raise ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")


def is_key(shown: str, expected: str) -> bool:
    """Return whether a key is right, in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), expected.encode())


def shown_key(headers: Mapping[str, str]) -> str:
    """Return a request's key, or an empty string.

    Read from `Authorization: Bearer`, or from `x-api-key`, as Anthropic's clients send it.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return headers.get("x-api-key", "")


def require_own_name(headers: Headers, host: str = "") -> None:
    """Raise ApiError 403 for requests that a web page may have sent to a server without a key.

    Such a request uses the page's own host name, which resolves to this machine, or has headers that tell
    its origin. `host` is the address that the server listens on.
    """
    named = headers.get("host", "")
    try:
        name = urlsplit(f"//{named}").hostname
    except ValueError:
        name = None
    if name not in _LOCAL_NAMES and name != host:
        raise ApiError(403, "this server answers to localhost only; start it with a key", code="wrong_host")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != named:
        raise ApiError(
            403,
            f"this server has no key, so it answers no web page of another origin such as {origin!r:.80}; "
            "start it with a key",
            code="wrong_origin",
        )
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "this server has no key, so it answers no other web page", code="wrong_origin")


def in_one_line(error: BaseException) -> str:
    """Format an error with the innermost places of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(frames))
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text} ({places})"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free port. Raises RequestError if that fails."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        remedy = "stop the program that uses it, or choose another port (0 takes a free one)"
        raise RequestError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    # Connections inherit the option. asyncio sets it only on sockets made with IPPROTO_TCP. Without it, a
    # response with separate writes for head and body waits 40 ms for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def server_config(app: ASGIApp, *, connections: int = 8192, **options: Any) -> uvicorn.Config:
    """Return uvicorn's config for an application inside `RequestChecks`.

    With more than `connections` connections, idle ones included, requests are answered with 503. A run may
    have thousands of agents, each with a connection pool.
    """
    import uvicorn

    allow_open_files()
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        **{"lifespan": "off", "timeout_graceful_shutdown": 1, **options},
    )


class BackgroundServer:
    """A server next to other work of the running event loop; it does not handle signals."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """Start answering; `app` must be inside `RequestChecks`."""
        import uvicorn

        self._server = uvicorn.Server(server_config(app, log_level="error"))
        # The program around it handles signals.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Stop listening and end the requests in progress."""
        self._server.should_exit = True
        await self._task


_HOST = "127.0.0.1"
_WRONG_KEY = "the API key belongs to no running episode; use the base_url and api_key of episode.endpoint"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address to which an agent sends requests to record them into one episode.

    It serves chat completions, completions, the Responses API and Anthropic's messages, all with streams,
    and also the list of models and token counts.
    """

    base_url: str
    """Ends in `/v1`, as the OpenAI SDKs expect."""
    api_key: str = field(repr=False)

    @property
    def anthropic_base_url(self) -> str:
        """The base URL without `/v1`, as the Anthropic SDKs expect."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that point the OpenAI and Anthropic SDKs of another process here."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class EndpointServer:
    """One HTTP server on the loopback interface; each episode has its own key."""

    def __init__(self) -> None:
        self._gateways: dict[str, Gateway] = {}
        """By key."""
        self._base_url = ""
        self._server: BackgroundServer | None = None

    def open(
        self, handler: Handler, memory: AnswerMemory | None = None, readers: Readers | None = None
    ) -> Endpoint:
        """Create a key; `handler` answers requests with it. Starts the server on the running event loop.

        `memory` has the answers to the episode's other clients; `readers` are the models.
        """
        if self._server is None:
            listening = listen(_HOST, 0)
            self._base_url = f"http://{_HOST}:{listening.getsockname()[1]}/v1"
            self._server = BackgroundServer(RequestChecks(self._record), listening)
        key = f"etude-{secrets.token_urlsafe(32)}"
        self._gateways[key] = Gateway(handler, memory or AnswerMemory(), readers)
        return Endpoint(self._base_url, key)

    def revoke(self, endpoint: Endpoint) -> None:
        """Refuse the endpoint's key from now on."""
        self._gateways.pop(endpoint.api_key, None)

    async def close(self) -> None:
        """Stop listening and end the requests in progress. A second call does nothing."""
        server, self._server = self._server, None  # A key that is created meanwhile starts another one.
        if server is not None:
            await server.close()

    async def _record(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if (gateway := self._gateways.get(shown_key(request.headers))) is None:
            raise ApiError(401, _WRONG_KEY, code="invalid_api_key")
        body = await request.body()
        answer = await gateway.answer(request.method, request.url.path, request.headers, body)
        await answer(scope, receive, send)
