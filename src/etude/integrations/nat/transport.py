"""Between an agent of the toolkit and its episode: recorded requests, and the steps that the agent took.

One HTTP client serves all episodes of an agent that was built once. Which of them a request belongs to is
known by the context that it is made in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import SecretStr
from pydantic_core import from_json, to_json

from etude.core.errors import EpisodeError
from etude.rollout.episode import Episode
from etude.store.journal import Journal
from etude.wire.gateway import FUNCTION_HEADER, BlockingRecordingTransport, RecordingTransport, error_response

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

BASE_URL = "http://recorded.invalid/v1"
API_KEY = "recorded"

FunctionName = Callable[[], str]
"""The function of the agent that is running where it is called."""

_speaker: ContextVar[Episode] = ContextVar("etude_nat_speaker")


@contextmanager
def speaking(episode: Episode) -> Iterator[None]:
    """Requests that are made inside, also in threads and tasks started there, belong to `episode`."""
    before = _speaker.set(episode)
    try:
        yield
    finally:
        _speaker.reset(before)


class EpisodeTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Hands each request to the episode that it is made in. No socket is opened.

    For clients with asyncio, and for those without in threads that an episode has started.
    """

    def __init__(self, model: str, function_name: FunctionName) -> None:
        """`model` is the entry of `llms` that answers."""
        self._model = model
        self._function_name = function_name

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The recorded answer; outside of any episode an error."""
        episode = _speaker.get(None)
        if episode is None:
            return _nobody(request, self._model)
        request.headers[FUNCTION_HEADER] = self._function_name()
        recording = RecordingTransport(lambda body: episode.answer(body, self._model), episode.said)
        return await recording.handle_async_request(request)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The recorded answer; outside of any episode an error. Raises EpisodeError on the event loop."""
        episode = _speaker.get(None)
        if episode is None:
            return _nobody(request, self._model)
        request.headers[FUNCTION_HEADER] = self._function_name()
        recording = BlockingRecordingTransport(
            lambda body: episode.answer(body, self._model), episode.loop.wait, episode.said
        )
        return recording.handle_request(request)


@asynccontextmanager
async def langchain_model(model: str, function_name: FunctionName) -> AsyncIterator[BaseChatModel]:
    """LangChain's chat model for all episodes. It says nothing of sampling: as the model's config has it."""
    from langchain_openai import ChatOpenAI

    # Neither has a timeout: how long an answer takes is the engine's matter, and episodes have their own.
    transport = EpisodeTransport(model, function_name)
    asynchronous = httpx.AsyncClient(transport=transport, timeout=None)
    blocking = httpx.Client(transport=transport, timeout=None)
    async with asynchronous:
        with blocking:
            yield ChatOpenAI(
                model=model,
                api_key=SecretStr(API_KEY),
                base_url=BASE_URL,
                max_retries=0,
                stream_usage=True,  # As the toolkit's own clients: its evaluators count tokens.
                http_async_client=asynchronous,
                http_client=blocking,
            )


def _nobody(request: httpx.Request, model: str) -> httpx.Response:
    """The answer to a request that no episode makes."""
    error = EpisodeError(
        f"the model '{model}' is being trained, and was called outside of an episode; give evaluators and "
        "whatever else runs beside the agent an entry of `llms` of their own"
    )
    return error_response(request.url.path, 409, str(error), cause=error).as_httpx()


class Steps:
    """Steps by episode: those of one that was not scored before a crash are there after it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def keep(self, episode_id: str, steps: Sequence[dict[str, Any]]) -> None:
        """Keep the dumped steps of an episode; what JSON cannot hold becomes text. Raises StoreError."""
        data = from_json(to_json(steps, fallback=str, inf_nan_mode="null"))
        await self._journal.put(_key(episode_id), {"steps": data})

    def of(self, episode_id: str) -> list[dict[str, Any]]:
        """The steps of an episode; none when none were kept."""
        data = self._journal.get(_key(episode_id))
        return [] if data is None else list(data["steps"])


def _key(episode_id: str) -> str:
    return f"{episode_id}/nat"
