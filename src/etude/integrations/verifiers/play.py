"""The play of one task of an environment, whose agents sample from Etude's models.

Every model call is recorded in the episode and answered in this process, without a network address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from pydantic_core import from_json, to_json
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.errors import model_error
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import runtime_is_local

from etude.config.import_path import where_raised
from etude.core.episode import Example
from etude.core.errors import EnvironmentAway, EpisodeError, EtudeError
from etude.integrations.verifiers.environment import Tasks, episode_error, find_scores
from etude.rollout.episode import Episode
from etude.wire.dialect import ChatBody, RecordedCompletion
from etude.wire.gateway import FUNCTION_HEADER, Gateway, as_httpx

_EVENT_END = b"\n\n"


class EpisodeCalls:
    """The model calls of one episode, answered in this process and recorded by Etude."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._gateway = Gateway(self._answer, episode.answers_given, episode.models)
        self.errors: list[EtudeError] = []
        """The errors of failed calls."""

    async def _answer(self, body: ChatBody) -> RecordedCompletion:
        try:
            return await self._episode.answer(body)
        except EtudeError as error:
            self.errors.append(error)
            raise

    async def send(self, path: str, body: Mapping[str, Any], agent: str) -> httpx.Response:
        """Answer an agent's request. Raises ProviderError with the HTTP status of a failed call."""
        answer = await self._gateway.answer("POST", path, {FUNCTION_HEADER: agent}, to_json(body))
        response = as_httpx(answer)
        if response.status_code < 400:
            return response
        raise model_error(response.text, status_code=response.status_code)


class EpisodeClientConfig(vf.EvalClientConfig):
    """The client config that connects an agent to the models of its episode."""

    base_url: str = "http://127.0.0.1:9/v1"
    """A placeholder, because verifiers requires an address. Nothing is sent to it."""
    api_key_var: str = "ETUDE_NO_KEY"
    """A placeholder, because verifiers requires a variable. Nothing reads it."""
    calls: Any = Field(exclude=True, repr=False)
    """The `EpisodeCalls` of the episode."""


class EpisodeClient(vf.Client):
    """A client that answers one agent's requests from the episode's models. It needs no key."""

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
        """Return one answer. Raises ProviderError."""
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
        """Return one answer as a stream of events. Raises ProviderError."""
        response = await self._calls.send(dialect.upstream_path, body, self._agent)

        async def chunks() -> AsyncIterator[bytes]:
            # verifiers expects one event in each chunk. Etude's chunks have one or more whole events.
            async for piece in response.aiter_raw():
                for event in piece.split(_EVENT_END)[:-1]:
                    yield event + _EVENT_END

        return RelayReply("text/event-stream", chunks(), response.aclose)

    async def relay_aux(
        self, dialect: Any, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Any:
        """Answer a request outside of the conversation, such as a count of its tokens."""
        return from_json((await self._calls.send(route, body, self._agent)).content)


STOP_SECONDS = 30.0
"""The time limit in seconds for an environment to stop. Then it is cancelled, with the same limit again."""

_LOG = logging.getLogger("etude.integrations.verifiers")


class RecordingServer(InterceptionServer):
    """verifiers' server for a rollout's model calls. Calls to the episode's models stay in this process."""

    def register(self, session: Any) -> tuple[str, str]:
        """Register a rollout. Its client is the episode's, unless its agent has a separate endpoint."""
        secrets: tuple[str, str] = super().register(session)
        config = session.ctx.client
        if isinstance(config, EpisodeClientConfig):
            session.client = EpisodeClient(config.calls, session.trace.agent.name)
        return secrets


@asynccontextmanager
async def run_servers(env: Any) -> AsyncIterator[None]:
    """Run `env.serving()` with Etude's server. Shared tool servers and hooks are the environment's."""
    async with env.shared_tools() as shared:
        local = all(runtime_is_local(spec.runtime) for spec in env._agent_specs.values())
        secrets = tuple(server.state_secret for server in shared.values() if server.state_secret)
        async with RecordingServer(requires_tunnel=not local, state_service_secrets=secrets) as server:
            env._shared_tools, env._interception = shared, server
            try:
                await env.start()
                yield
            finally:
                try:
                    await env.stop()
                finally:
                    env._shared_tools, env._interception = {}, None


class VerifiersWorkflow:
    """The workflow of an environment. Its output is the last answer of each agent.

    The environment's servers start with the first episode, so a config check starts nothing. One task starts
    and stops them, because some contexts must be exited by the task that entered them.
    """

    def __init__(self, env: Any, tasks: Tasks) -> None:
        self.env = env
        self.tasks = tasks
        self.name = env.config.env_id
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def __call__(self, example: Example, episode: Episode) -> Any:
        """Play the task of an example. Raises EpisodeError, with its cause, if there is no result.

        Raises EnvironmentAway if the environment's servers do not start.
        """
        task = self.tasks.find(example)
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        await asyncio.shield(self._ready)
        calls = EpisodeCalls(episode)
        # `policy` is verifiers' model of a role that names none. Etude answers with the trained model.
        context = vf.ModelContext(model="policy", client=EpisodeClientConfig(calls=calls))
        try:
            played = await self.env.run_episode(task, context)
        except Exception as error:
            raise EpisodeError(f"'{self.name}', task {example.id!r}: {where_raised(error)}") from error
        if not self.env.complete(played):
            raise episode_error(self.name, example.id, played, calls.errors)
        for score in find_scores(played.traces):
            reason = f"mean of {score.runs} runs" if score.runs > 1 else None
            episode.score(score.name, score.value, reason, agent=score.agent)
        for trace in played.traces:
            if trace.stop_condition not in (None, "agent_completed", "user_closed"):
                episode.note(f"{trace.agent.name} was stopped: {trace.stop_condition}")
        replies: dict[str, list[str]] = defaultdict(list)
        for trace in played.traces:
            replies[trace.agent.name].append(trace.last_reply)
        # An agent with several runs has a list.
        by_agent = {agent: texts[0] if len(texts) == 1 else texts for agent, texts in replies.items()}
        return next(iter(by_agent.values())) if len(by_agent) == 1 else by_agent

    async def close(self) -> None:
        """Stop the environment's servers. Calling it twice is fine.

        If the environment does not stop, this logs a warning and leaves it, because played episodes count.
        """
        self._over.set()
        task, self._serving = self._serving, None
        if task is None:
            return
        await asyncio.wait([task], timeout=STOP_SECONDS)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=STOP_SECONDS)
            reason = f"it took longer than {STOP_SECONDS:g} s"
        elif task.cancelled() or (error := task.exception()) is None:
            return
        else:
            reason = where_raised(error)
        _LOG.warning("environment '%s' did not stop: %s", self.name, reason)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with run_servers(self.env):
                ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if ready.done():
                raise
            reason = f"{type(error).__name__}: {error}"
            ready.set_exception(EnvironmentAway(f"what the environment needs did not start: {reason}"))
