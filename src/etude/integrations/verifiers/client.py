"""The client by which verifiers calls the models: every call is one of the episode's, without an address."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import PrivateAttr
from pydantic_core import from_json, to_json
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.errors import model_error

from etude.core.errors import EtudeError
from etude.rollout.episode import Episode
from etude.wire.answers import RecordedCompletion
from etude.wire.dialect import ChatBody
from etude.wire.gateway import FUNCTION_HEADER, Gateway

NOWHERE = "http://127.0.0.1:9/v1"
"""The address that a client's config must have; nothing is sent to it."""

NO_KEY = "ETUDE_NO_KEY"
"""The variable that a client's config must name for its key; nothing reads it."""

_EVENT_END = b"\n\n"


class EpisodeCalls:
    """The model calls of one episode, answered inside of this process and recorded by Etude."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._gateway = Gateway(self._answer, episode.said, episode.readers)
        self.errors: list[EtudeError] = []
        """Why calls had no answer."""

    async def _answer(self, body: ChatBody) -> RecordedCompletion:
        try:
            return await self._episode.answer(body)
        except EtudeError as error:
            self.errors.append(error)
            raise

    async def send(self, path: str, body: Mapping[str, Any], agent: str) -> httpx.Response:
        """The answer to a request of an agent's. Raises ProviderError with the status that there is."""
        reply = await self._gateway.answer("POST", path, {FUNCTION_HEADER: agent}, to_json(body))
        response = reply.as_httpx()
        if response.status_code < 400:
            return response
        raise model_error(response.text, status_code=response.status_code)


class EpisodeClientConfig(vf.EvalClientConfig):
    """Stands in an agent's config for the models of the episode that it plays in."""

    base_url: str = NOWHERE
    api_key_var: str = NO_KEY
    _calls: EpisodeCalls | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, calls: EpisodeCalls) -> EpisodeClientConfig:
        """That of an episode."""
        made = cls()
        made._calls = calls
        return made

    def client(self, agent: str) -> EpisodeClient:
        """The client of an agent in the episode."""
        assert self._calls is not None, "an EpisodeClientConfig is made by `of`"
        return EpisodeClient(self._calls, agent)


class EpisodeClient(vf.Client):
    """Answers one agent's requests by the models of the episode. It has no key: none is needed."""

    def __init__(self, calls: EpisodeCalls, agent: str) -> None:
        self._calls = calls
        self._agent = agent

    async def get_response(
        self,
        dialect: Any,
        body: Mapping[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One answer. Raises ProviderError."""
        data = from_json((await self._calls.send(dialect.upstream_path, body, self._agent)).content)
        response = dialect.parse_response(dialect.validate_response(data))
        response.raw = data
        return response

    async def relay(
        self,
        dialect: Any,
        body: Mapping[str, Any],
        session_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RelayReply:
        """One answer as a stream of events. Raises ProviderError."""
        response = await self._calls.send(dialect.upstream_path, body, self._agent)

        async def chunks() -> AsyncIterator[bytes]:
            # verifiers takes each chunk for one event. A piece of Etude's has one or several, each whole.
            async for piece in response.aiter_raw():
                for event in piece.split(_EVENT_END)[:-1]:
                    yield event + _EVENT_END

        return RelayReply("text/event-stream", chunks(), response.aclose)

    async def relay_aux(
        self, dialect: Any, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer to a request beside the conversation, such as a count of its tokens."""
        return from_json((await self._calls.send(route, body, self._agent)).content)
