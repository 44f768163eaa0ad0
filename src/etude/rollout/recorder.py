"""The recorder: makes an episode's model calls, each as a journalled step."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast, overload

from etude.core.call import Call, ChatRequest, Completion, Delta, Sampling
from etude.core.episode import SIMULATED_USER, WORKFLOW
from etude.core.errors import EpisodeError, EtudeError, RequestError, StoreError, error_words
from etude.core.interfaces import Engine, innermost
from etude.core.json_text import plain
from etude.core.keys import fold
from etude.core.message import Message, tool_arguments
from etude.core.threads import set_value
from etude.engines.meter import Role, asking_for
from etude.store.episodes import CallReader, call_key, encode_call, shared_messages
from etude.store.journal import Steps
from etude.wire.dialect import ChatBody, model_object
from etude.wire.request_body import change_sampling
from etude.wire.retries import count_retries

Fn = TypeVar("Fn", bound=Callable[..., Any])

_PARENT_CANDIDATES = 8
"""The number of recent calls among which a new call's predecessor is looked for."""
_IN_EVERY_DIGEST = ("temperature", "top_p", "max_tokens", "stop", "seed")
"""Fields of `Sampling` that are hashed even at their defaults."""
_USUAL = ["auto", True, {}, None, 0]
"""Most requests' tool choice, parallel calls, template options, prompt and logprobs. Others are hashed."""


def _as_json(value: Any) -> dict[str, Any]:
    try:
        return asdict(value)
    except TypeError:
        raise RequestError(f"a {type(value).__qualname__} in a request is not JSON: {value!r:.80}") from None


_JSON = json.JSONEncoder(default=_as_json)


@dataclass(frozen=True, slots=True)
class Models:
    """Engines by name, their default sampling, and the default engine."""

    engines: Mapping[str, Engine]
    sampling: Mapping[str, Sampling] = field(default_factory=dict)
    default: str | None = None
    template_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Each model's default variables of the chat template."""
    under_way: dict[tuple[Recorder, int], tuple[str, float]] = field(default_factory=dict, compare=False)
    """Calls without an answer yet, by recorder and index: the model, and the start by the monotonic clock."""
    settling: set[object] = field(default_factory=set, compare=False)
    """The collections that wait for these answers, and then stop. Meanwhile no call begins."""

    def __post_init__(self) -> None:
        """Raise RequestError if there are no models, or the default is not one of them."""
        if not self.engines:
            raise RequestError("there are no models for the agent to call; add an entry to `llms`")
        for name in (*self.sampling, *((self.default,) if self.default is not None else ())):
            self.require(name)

    def choose(self, name: str | None) -> str:
        """Return the model for a name, or the default. Raises RequestError if the choice is not clear."""
        if name is not None:
            return self.require(name)
        if self.default is not None:
            return self.default
        if len(self.engines) > 1:
            raise RequestError(f"there are several models; name the one to call: {', '.join(self.engines)}")
        return next(iter(self.engines))

    def require(self, name: str) -> str:
        """Return `name` if it is a model. Raises RequestError, which names the models."""
        if name not in self.engines:
            raise RequestError(f"there is no model '{name}'; models: {', '.join(self.engines)}")
        return name

    def models(self) -> list[dict[str, Any]]:
        """Return OpenAI's `model` object of each."""
        return [model_object(name, 0) for name in self.engines]

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[Any]:
        """Yield a model's text codec. Raises RequestError for a model that is sampled elsewhere."""
        name = model if model in self.engines else self.choose(None)
        codec = getattr(innermost(self.engines[name]), "codec", None)
        if codec is None:
            raise RequestError(
                f"another server samples the model '{name}', and only that server knows its tokens",
                param="model",
            )
        yield codec


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to call."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """The arguments by name; None if the model did not write a JSON object."""
    raw_arguments: str
    """The arguments exactly as the model wrote them."""

    def result(self, content: Any) -> Message:
        """Return the tool message with `content` for the model. Anything but text is written as JSON."""
        text = content if isinstance(content, str) else json.dumps(plain(content), ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer."""

    text: str
    """The message's content; empty if there is none."""
    thinking: str
    """The model's thinking before its answer, which is not part of the text; empty if there is none."""
    message: Message
    """The message in OpenAI's format. Append it to the conversation to continue."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    logprobs: tuple[float, ...] | None
    """The natural-log probability of each sampled token, if the engine returns it."""
    token_ids: tuple[int, ...] | None
    """The sampled token ids, if the engine returns them."""


def make_reply(call: Call) -> Reply:
    """Return the answer of a finished call. Its message is a copy, so the record cannot be changed."""
    completion = call.completion
    assert completion is not None, "the call has no answer"
    message = plain(completion.message)
    content = message.get("content")
    return Reply(
        text=content if isinstance(content, str) else "",
        thinking=completion.thinking,
        message=message,
        tool_calls=tuple(map(_tool_call, message.get("tool_calls") or ())),
        finish_reason=completion.finish_reason,
        logprobs=completion.logprobs,
        token_ids=completion.completion_ids,
    )


def _tool_call(wire: Any) -> ToolCall:
    function, arguments = wire["function"], None
    with suppress(RequestError):
        arguments = tool_arguments(function)
    return ToolCall(wire.get("id", ""), function["name"], arguments, function["arguments"])


current_function: ContextVar[str] = ContextVar("etude_function", default=WORKFLOW)
"""The function that model calls made here belong to."""


@overload
def function(fn: Fn, /) -> Fn: ...


@overload
def function(*, name: str) -> Callable[[Fn], Fn]: ...


def function(fn: Fn | None = None, /, *, name: str | None = None) -> Fn | Callable[[Fn], Fn]:
    """Decorate a function of an agent: model calls made inside it belong to it.

    `@etude.function` takes the function's own name, `@etude.function(name="search")` another one.
    `finetuning.target_functions` lists these names.
    """

    def copy_with_name(fn: Fn) -> Fn:
        label = name or fn.__name__
        if not inspect.iscoroutinefunction(fn):
            return set_value(current_function, label)(fn)

        @functools.wraps(fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with set_value(current_function, label):
                return await fn(*args, **kwargs)

        return cast("Fn", call)

    return copy_with_name if fn is None else copy_with_name(fn)


@dataclass(eq=False)
class Recorder:
    """The calls of one episode, in order.

    A call's name is the hash of its request, and the number of equal requests before it. Its randomness
    follows from that name. So a workflow that runs again gets its old answers, whatever else has changed, and
    a new request gets a new answer.
    """

    episode_id: str
    models: Models
    journal: Steps
    seed: int
    override: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Sampling` for all calls, over the agent's."""
    max_calls: int | None = None
    names: dict[int, str] = field(default_factory=dict)
    """The names of the calls in the journal, by index."""
    fatal: EtudeError | None = None
    """Set when the run cannot continue, however the agent handles the error."""

    def __post_init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._calls: list[Call | None] = []
        self._reader = CallReader(self.journal, self.episode_id)
        self._closed = False
        self._longest = 0.0

    @property
    def last_index(self) -> int:
        """The index of the call that was started last; -1 if there was none."""
        return len(self._calls) - 1

    def calls(self) -> tuple[Call, ...]:
        """Return all calls that were started and have ended."""
        return tuple(call for call in self._calls if call is not None)

    def longest_call(self) -> float:
        """Return the seconds of the slowest call so far, including calls under way."""
        under_way = self.models.under_way.items()
        starts = (start for (recorder, _), (_, start) in under_way if recorder is self)
        return max([self._longest, *(time.monotonic() - start for start in starts)])

    def close(self) -> None:
        """Refuse further calls, and leave calls under way out of the record."""
        self._closed = True

    async def ask(
        self,
        asked: ChatBody,
        *,
        model: str | None,
        function: str,
        on_delta: Callable[[str, Delta], None] | None = None,
    ) -> tuple[str, Call]:
        """Make a call, or read it from the journal. Returns its name and the call.

        `model` overrides the request's model. `on_delta` gets the call's name with each piece of a sampled
        answer. An answer from the journal has no pieces.

        Raises RequestError for an unknown model or impossible sampling, EngineError if the model has no
        answer. Raises EpisodeError if the episode is over or has made too many calls.
        """
        if not isinstance(function, str):
            raise RequestError(f"the name of an agent's function is text, found {function!r:.80}")
        await self._admit()
        model = self.models.choose(model)
        default = self.models.sampling.get(model) or Sampling()
        chosen = change_sampling(change_sampling(default, asked.sampling), self.override)
        if asked.choice and chosen.seed is not None:
            chosen = replace(chosen, seed=fold(chosen.seed, "choice", asked.choice))
        options = {**self.models.template_options.get(model, {}), **asked.template_options}
        request = replace(asked, template_options=options).as_request(chosen)
        digest = _digest(model, request)
        name = f"{digest}/{self._asked[digest]}"
        self._asked[digest] += 1
        key = fold(self.seed, self.episode_id, name) if chosen.seed is None else chosen.seed
        request = replace(request, key=key, conversation=self.episode_id)
        index = len(self._calls)
        self._calls.append(None)
        self.models.under_way[self, index] = model, time.monotonic()
        try:
            listener = None if on_delta is None else partial(on_delta, name)
            call = await self._make(name, Call(index, function, model, request), listener)
        finally:
            _, start = self.models.under_way.pop((self, index))
            self._longest = max(self._longest, time.monotonic() - start)
        if not self._closed:
            self._calls[index] = call
            self.names[index] = name
        return name, call

    async def _admit(self) -> None:
        while self.models.settling:  # noqa: ASYNC110  the collector may be in another thread
            await asyncio.sleep(0.05)
        if self._closed:
            problem = "is over; it can make no more calls"
        elif self.max_calls is not None and len(self._calls) >= self.max_calls:
            problem = (
                f"has made {self.max_calls} calls, which is the limit; fix the agent's loop, or raise "
                "eval.general.max_calls"
            )
        else:
            return
        # A loop that catches the error and asks again must not block the event loop.
        await asyncio.sleep(0)
        raise EpisodeError(f"episode {self.episode_id} {problem}")

    async def _make(self, name: str, asked: Call, on_delta: Callable[[Delta], None] | None) -> Call:
        """Return the call with its answer, from the model or from the journal."""
        began, since = time.time(), time.monotonic()

        def end_call(completion: Completion | None, error: str | None = None) -> Call:
            return replace(
                asked,
                completion=completion,
                error=error,
                retried=dict(count.causes),
                waited=count.waited,
                began=began,
                seconds=time.monotonic() - since,
            )

        key = call_key(self.episode_id, name)
        try:
            with count_retries() as count:
                if (data := self.journal.get(key)) is None:
                    call = end_call(await self._complete(asked, on_delta))
                    await self.journal.put(key, encode_call(call, self._parent(call)))
                else:
                    stored = self._reader.decode(name, data)
                    call = replace(stored, index=asked.index, function=asked.function, request=asked.request)
        except StoreError as error:
            self.fatal = error
            raise
        except BaseException as error:
            if not self._closed:
                is_cancelled = isinstance(error, asyncio.CancelledError)
                words = str(error) if isinstance(error, EtudeError) else error_words(error)
                reason = "cancelled before the answer arrived" if is_cancelled else words
                self._calls[asked.index] = end_call(None, reason)
            raise
        self._reader.add(name, call)
        return call

    async def _complete(self, asked: Call, on_delta: Callable[[Delta], None] | None) -> Completion:
        """Have the model answer."""
        model, request = asked.model, asked.request
        earlier = tuple(
            call
            for call in self._calls
            if call is not None and call.model == model and call.completion is not None
        )
        if earlier or on_delta is not None:
            request = replace(request, earlier=earlier, on_delta=on_delta)
        role: Role = "user" if asked.function == SIMULATED_USER else "agent"
        with asking_for(role, self.episode_id):
            return await self.models.engines[model].complete(request)

    def _parent(self, call: Call) -> tuple[str, Call] | None:
        """Return the recent call that shares the most messages with this one, and its name."""
        best, most = None, -1
        for candidate in reversed(self._calls[-_PARENT_CANDIDATES:]):
            if candidate is None or candidate.completion is None:
                continue
            shared = shared_messages(candidate, call.request.messages)
            if shared > most:
                best, most = (self.names[candidate.index], candidate), shared
            if shared > len(candidate.request.messages):
                break  # This call continues that one. No earlier call can share more.
        return best


def _digest(model: str, request: ChatRequest) -> str:
    """Hash everything that can change the answer, to 16 hexadecimal digits."""
    sampling, prompt, top = request.sampling, request.prompt, request.top_logprobs
    chosen: list[Any] = [getattr(sampling, name) for name in _IN_EVERY_DIGEST]
    rest = {name: value for name, value in sampling.non_defaults().items() if name not in _IN_EVERY_DIGEST}
    parts: list[Any] = [model, request.messages, request.tools, [*chosen, rest] if rest else chosen]
    form = [request.tool_choice, request.parallel_tool_calls, request.template_options]
    if [*form, prompt, top] != _USUAL:
        parts += form
        parts += [prompt, top] if prompt is not None or top else []
    text = _JSON.encode(parts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
