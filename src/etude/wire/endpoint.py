"""A loopback HTTP endpoint that records calls, for agents in another process or language."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etude.wire.dialect import AnswerMemory

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from etude.wire.gateway import Gateway, Handler, Readers
    from etude.wire.http_server import BackgroundServer

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
        self._socket: socket.socket | None = None
        self._server: BackgroundServer | None = None

    @property
    def base_url(self) -> str:
        """The server's address; requires an earlier call of `start`."""
        assert self._socket is not None, "the endpoint has not been started"
        return f"http://{_HOST}:{self._socket.getsockname()[1]}/v1"

    def start(self) -> None:
        """Listen, and serve on the running event loop. Connections are accepted when this returns.

        Does nothing if it is already listening.
        """
        if self._socket is not None:
            return
        from etude.wire.http_server import BackgroundServer, RequestChecks, listen

        self._socket = listen(_HOST, 0)
        self._server = BackgroundServer(RequestChecks(self._record), self._socket)

    def open(
        self, handler: Handler, memory: AnswerMemory | None = None, readers: Readers | None = None
    ) -> Endpoint:
        """Create a key; `handler` answers requests with it. Starts the server.

        `memory` has the answers to the episode's other clients; `readers` are the models.
        """
        from etude.wire.gateway import Gateway

        self.start()
        key = f"etude-{secrets.token_urlsafe(32)}"
        self._gateways[key] = Gateway(handler, memory, readers)
        return Endpoint(self.base_url, key)

    def revoke(self, endpoint: Endpoint) -> None:
        """Refuse the endpoint's key from now on."""
        self._gateways.pop(endpoint.api_key, None)

    async def close(self) -> None:
        """Stop listening and end the requests in progress. A second call does nothing."""
        if self._server is not None:
            await self._server.close()
            self._server = self._socket = None

    async def _record(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        from etude.wire.http_server import ApiError, shown_key

        request = Request(scope, receive)
        if (gateway := self._gateways.get(shown_key(request.headers))) is None:
            raise ApiError(401, _WRONG_KEY, code="invalid_api_key")
        body = await request.body()
        answer = await gateway.answer(request.method, request.url.path, request.headers, body)
        await answer.as_starlette()(scope, receive, send)
