"""A loopback HTTP endpoint that records calls, for agents in another process or language."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etude.wire.dialect import AnswerMemory
from etude.wire.tokens import Readers

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Receive, Scope, Send

    from etude.wire.gateway import Gateway, Handler
    from etude.wire.http_server import BackgroundServer

_HOST = "127.0.0.1"
_WRONG_KEY = "the API key is not that of a running episode; use the base_url and api_key of episode.endpoint"


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

    def __init__(self, *, port: int = 0) -> None:
        """Port 0 lets the system choose a free one."""
        self._port = port
        self._gateways: dict[str, tuple[str, Gateway]] = {}
        self._socket: socket.socket | None = None
        self._server: BackgroundServer | None = None

    @property
    def base_url(self) -> str:
        """The server's address; requires an earlier call of `start`."""
        assert self._socket is not None, "the endpoint has not been started"
        return f"http://{_HOST}:{self._socket.getsockname()[1]}/v1"

    def start(self) -> None:
        """Listen, and serve on the running event loop. Connections are accepted when this returns.

        Does nothing if it is already listening. Raises RequestError if the port is in use.
        """
        if self._socket is not None:
            return
        from etude.wire.http_server import BackgroundServer, listen

        self._socket = listen(_HOST, self._port)
        self._server = BackgroundServer(self._application(), self._socket)

    def open(
        self, handler: Handler, memory: AnswerMemory | None = None, readers: Readers | None = None
    ) -> Endpoint:
        """Create a key; `handler` answers requests with it. Starts the server.

        `memory` has the answers to the episode's other clients; `readers` are the models.
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
        """Stop listening and end the requests in progress. A second call does nothing."""
        if self._server is not None:
            await self._server.close()
            self._server = self._socket = None

    def _application(self) -> ASGIApp:
        from starlette.requests import Request

        from etude.wire.http_server import RequestChecks

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            gateway = self._gateway(request.headers)
            body = await request.body()
            answer = await gateway.answer(request.method, request.url.path, request.headers, body)
            await answer.as_starlette()(scope, receive, send)

        return RequestChecks(record)

    def _gateway(self, headers: Headers) -> Gateway:
        """Return the gateway for a request's key. Raises ApiError for a wrong key."""
        from etude.wire.http_server import ApiError, is_key, shown_key

        # The name only finds the entry; comparing the secret takes the same time, right or wrong.
        name, _, secret = shown_key(headers).removeprefix("etude-").partition("-")
        expected, gateway = self._gateways.get(name, ("", None))
        if gateway is None or not is_key(secret, expected):
            raise ApiError(401, _WRONG_KEY, code="invalid_api_key")
        return gateway
