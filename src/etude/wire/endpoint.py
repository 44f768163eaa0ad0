"""A loopback HTTP endpoint that records: for agents in another process or language."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etude.core.errors import RequestError
from etude.wire.dialect import AnswerMemory
from etude.wire.tokens import Readers

if TYPE_CHECKING:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from etude.wire.gateway import Gateway, Handler

_SHUTDOWN_SECONDS = 1
_BACKLOG = 512


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send requests so that they are recorded into one episode.

    Chat completions, completions, the Responses API, and Anthropic's messages, with streams; the models,
    and counting their tokens.
    """

    base_url: str
    """Ends in `/v1`, as the OpenAI SDKs want it."""
    api_key: str = field(repr=False)

    @property
    def anthropic_base_url(self) -> str:
        """The same without `/v1`, as the Anthropic SDKs want it."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the OpenAI and Anthropic SDKs in another process find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class EndpointServer:
    """One HTTP server on the loopback interface; each episode has a key of its own."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 lets the system choose a free one."""
        self._host = host
        self._port = port
        self._gateways: dict[str, tuple[str, Gateway]] = {}
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """The address, once `start` was called."""
        assert self._socket is not None, "the endpoint has not been started"
        return f"http://{self._host}:{self._socket.getsockname()[1]}/v1"

    def start(self) -> None:
        """Listen, and serve on the running event loop. Connections are accepted when this returns.

        Does nothing when it is listening already. Raises RequestError when the port is in use.
        """
        if self._socket is not None:
            return
        import uvicorn

        self._socket = listen(self._host, self._port)
        config = uvicorn.Config(
            self._application(),
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        # Ctrl-C is for the run, not for its endpoint.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    def open(
        self, handler: Handler, memory: AnswerMemory | None = None, readers: Readers | None = None
    ) -> Endpoint:
        """A new key; requests that bear it are answered by `handler`. Starts the server.

        `memory` holds the answers that the episode's other clients were given; `readers` are the models.
        """
        from etude.wire.gateway import Gateway

        self.start()
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._gateways[name] = (secret, Gateway(handler, memory, readers))
        return Endpoint(self.base_url, f"etude-{name}-{secret}")

    def revoke(self, endpoint: Endpoint) -> None:
        """Refuse the endpoint's key from now on."""
        self._gateways.pop(endpoint.api_key.split("-")[1], None)

    async def close(self) -> None:
        """Stop listening and end the requests under way. Calling it twice is fine."""
        if self._task is not None and self._server is not None:
            self._server.should_exit = True
            await self._task
            self._task = self._socket = None

    def authorized(self, headers: Mapping[str, str]) -> Gateway | None:
        """The gateway that a request's key gives access to, if any.

        The key is in `Authorization: Bearer`, or in `x-api-key` where Anthropic's clients have it.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        _, _, rest = key.partition("-")
        name, _, secret = rest.partition("-")
        # The name only finds the entry; whether the secret is right must not show in the time it takes.
        expected, gateway = self._gateways.get(name, ("", None))
        same = hmac.compare_digest(expected.encode(), secret.encode())
        return gateway if same else None

    def _application(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        from etude.wire.gateway import error_response

        async def record(request: Request) -> Response:
            path, gateway = request.url.path, self.authorized(request.headers)
            if gateway is None:
                message = (
                    "the API key is not that of a running episode; use the base_url and api_key of "
                    "episode.endpoint"
                )
                response = error_response(path, 401, message, code="invalid_api_key")
            else:
                response = await gateway.answer(request.method, path, request.headers, await request.body())
            return as_starlette(response)

        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
        return Starlette(routes=[Route("/{path:path}", record, methods=methods)])


def as_starlette(response: httpx.Response) -> Response:
    """The response of a gateway as a server sends it."""
    import httpx
    from starlette.responses import Response, StreamingResponse

    headers = dict(response.headers)
    if isinstance(response.stream, httpx.SyncByteStream):
        return Response(response.content, response.status_code, headers)
    return StreamingResponse(response.aiter_raw(), response.status_code, headers)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises RequestError when that is not possible."""
    try:
        listening = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        in_use = f"port {port} on {host} is in use by another program; stop it"
        other = f"cannot listen on {host}:{port}: {error.strerror}"
        reason = in_use if error.errno == errno.EADDRINUSE else other
        raise RequestError(f"{reason}, or choose another port (0 takes a free one)") from error
    # Connections inherit it. asyncio would set it only where the socket was made with IPPROTO_TCP, and an
    # answer whose head and body are two writes waits 40 ms for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening
