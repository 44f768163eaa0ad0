"""The live episode, through which a workflow calls models, with asyncio or without."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel

from etude.core.call import Delta
from etude.core.data_model import number
from etude.core.episode import Event, Example, ToolSet
from etude.core.errors import EpisodeError, RequestError
from etude.core.evaluation import LARGEST_SCORE, is_score
from etude.core.interfaces import innermost
from etude.core.keys import generator
from etude.core.message import Message, Tool
from etude.core.threads import set_value
from etude.engines.programs import ProgramFolder, ProgramResult, last_line
from etude.rollout.recorder import Recorder, Reply, ToolCall, current_function, make_reply
from etude.rollout.tools import EpisodeTools, Tools, describe_tools
from etude.wire.dialect import AnswerHeader, AnswerMemory, ChatBody, RecordedCompletion
from etude.wire.request_body import FormFields, choose_tool, plain_messages, validate_body

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from etude.wire.http_server import Endpoint, EndpointServer

P = ParamSpec("P")
T = TypeVar("T")


class EpisodeLoop:
    """The run's event loop, where an episode's calls are made and recorded.

    Code in other threads waits for that loop. When the episode is over, its calls raise EpisodeError.
    """

    def __init__(self, episode_id: str) -> None:
        self.loop = asyncio.get_running_loop()
        self._episode_id = episode_id
        self._thread = threading.get_ident()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self.is_over = False

    @property
    def is_here(self) -> bool:
        """Whether this code runs on that loop's thread."""
        return threading.get_ident() == self._thread

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on that loop and return its result, from a coroutine on any loop."""
        if self.is_here:
            return await work
        with self._submit(work) as waiting:
            try:
                return await asyncio.wrap_future(waiting)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if self.is_over and task is not None and not task.cancelling():
                    raise self._closed_error() from error
                raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on that loop and block until its result, from other threads only."""
        if self.is_here:
            work.close()
            raise EpisodeError("a blocking call on the event loop would wait forever; write `async def`")
        with self._submit(work) as waiting:
            try:
                return waiting.result()
            except concurrent.futures.CancelledError as error:
                raise self._closed_error() from error

    def callback_on_this_loop(self, fn: Callable[P, None]) -> Callable[P, None]:
        """Wrap `fn` so that code on the episode's loop can call it here, on the current loop."""
        if self.is_here:
            return fn
        loop = asyncio.get_running_loop()

        def send(*args: P.args, **kwargs: P.kwargs) -> None:
            with contextlib.suppress(RuntimeError):  # The current loop may be closed.
                loop.call_soon_threadsafe(functools.partial(fn, *args, **kwargs))

        return send

    def close(self) -> None:
        """Cancel all waits in other threads."""
        self.is_over = True
        for waiting in tuple(self._waiting):
            waiting.cancel()

    @contextlib.contextmanager
    def _submit(self, work: Coroutine[Any, Any, T]) -> Iterator[concurrent.futures.Future[T]]:
        if self.is_over:
            work.close()
            raise self._closed_error()
        waiting = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._waiting.add(waiting)
        try:
            yield waiting
        finally:
            self._waiting.discard(waiting)

    def _closed_error(self) -> EpisodeError:
        return EpisodeError(f"episode {self._episode_id} is over; it can make no more calls")


class Episode:
    """One run of the workflow on one example. Every model call made through it is recorded."""

    def __init__(
        self,
        example: Example,
        generation: int,
        recorder: Recorder,
        *,
        seed: int,
        server: EndpointServer,
        tools: Mapping[str, ToolSet],
    ) -> None:
        self.example = example
        """The dataset row of this run."""
        self.generation = generation
        """The episode's number among the example's parallel episodes, from 0."""
        self.widths: Any = None
        """The widths for a played protocol. They override the workflow's."""
        self.loop = EpisodeLoop(recorder.episode_id)
        """The run's event loop, even if the workflow runs on another loop."""
        self._seed = seed
        self._recorder = recorder
        self._server = server
        self._events: list[Event] = []

        def record(event: Event) -> None:
            self._events.append(replace(event, after_call=recorder.last_index))

        self.tool_sets = tuple(tools)
        """The entries of the config's `tools`."""
        self._tools = EpisodeTools(self.id, tools, recorder.journal, record, self.loop.call)
        self._endpoint: Endpoint | None = None
        self._workplace = ProgramFolder()
        self.answers_given = AnswerMemory()
        """The answers that clients were given, to recognise them in any form that they come back in."""
        self.models = recorder.models
        """The models that clients may ask, and their readers."""

    @property
    def id(self) -> str:
        """Unique within the run."""
        return self._recorder.episode_id

    @functools.cached_property
    def random(self) -> random.Random:
        """This episode's random numbers, which are the same when it is resumed."""
        return generator(self._seed, self.id, "random")

    async def chat(
        self,
        messages: Sequence[Any],
        *,
        model: str | None = None,
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        response_format: Any = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Ask a model to continue the conversation.

        `messages` are in OpenAI's format. `model` is an entry of `llms`. You may leave it out if there is
        only one, or only one is trained. `tools` are dicts in OpenAI's format, or Python functions described
        by their signature and docstring. The agent calls them itself. Missing sampling parameters come from
        the config. `response_format` is a pydantic model or OpenAI's format, and the answer cannot leave this
        form. `tool_choice` is as in OpenAI's API. `chat_template_kwargs` are variables of the model's chat
        template, such as `enable_thinking`.

        Raises RequestError for a wrong request, EngineError if the model has no answer. Raises EpisodeError
        if the episode is over or has made too many calls.
        """
        if isinstance(response_format, type) and issubclass(response_format, BaseModel):
            schema = {"schema": response_format.model_json_schema()}
            response_format = {"type": "json_schema", "json_schema": schema}
        form = validate_body(FormFields, {"response_format": response_format}).constraint()
        sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "stop": stop,
            "seed": seed,
            **form,
        }
        described = describe_tools(tools)
        asked = ChatBody(
            "",
            plain_messages(messages),
            described,
            sampling,
            tool_choice=choose_tool(described, tool_choice),
            template_options=chat_template_kwargs or {},
        )
        _, call = await self.loop.call(
            self._recorder.ask(asked, model=model, function=current_function.get())
        )
        return make_reply(call)

    def openai(self, model: str | None = None) -> AsyncOpenAI:
        """Return a real `AsyncOpenAI` client whose chat completions and responses are recorded here.

        A request that names an entry of `llms` goes to it. Any other model name means `model`, or the model
        that `chat` would take. The client does not retry and opens no connection.
        """
        from etude.wire.gateway import recording_client

        if model is not None:
            self.models.require(model)
        return recording_client(lambda body: self.answer(body, model), self.answers_given)

    @property
    def endpoint(self) -> Endpoint:
        """The base URL and key of the recorded models, for code in another process.

        The server listens on this machine only, and refuses the key when the episode is over.
        """
        if not self.loop.is_here:

            async def get_endpoint() -> Endpoint:
                return self.endpoint

            return self.loop.wait(get_endpoint())
        if self._endpoint is None:
            self._endpoint = self._server.open(self.answer, self.answers_given, self.models)
        return self._endpoint

    @property
    def folder(self) -> Path:
        """An empty folder for this episode's files, removed when the episode is over."""
        return self._workplace.folder

    async def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
        timeout: float | None = None,  # noqa: ASYNC109  like subprocess.run
        check: bool = True,
    ) -> ProgramResult:
        """Run another program to its end, such as a coding agent that uses this episode's model.

        It works in `cwd`, or in `folder`, with an empty home. Its environment has only what programs need to
        run, the variables of `endpoint.environment`, and `env`. It is stopped after `timeout` seconds. Its
        process group ends with it. Its status and output are noted.

        Raises EpisodeError if it cannot be started, and with `check` if it fails or is stopped.
        """
        if isinstance(command, str) or not command:
            words = str(command).split() if command else ["ls", "-l"]
            raise RequestError(f"episode.run takes a list, {words!r}, and not {command!r:.80}")
        environment = {**self.endpoint.environment, **(env or {})}
        for each in (*command, *environment, *environment.values(), input):
            if not isinstance(each, str | Path):
                raise RequestError(f"episode.run takes strings and paths, found {each!r:.80}; write str(…)")
        where = self.folder if cwd is None else Path(cwd)
        result = await self.loop.call(self._workplace.run(command, where, environment, input, timeout))
        name = Path(command[0]).name
        self.note(result.note(name))
        if check and result.returncode != 0:
            raise EpisodeError(f"{result.describe(name)}; {last_line(result)}")
        return result

    def tools(self, *sets: str | ToolSet | Callable[..., Any]) -> AbstractAsyncContextManager[Tools]:
        """Open tools with `async with episode.tools("search") as tools:`; their calls are recorded.

        `sets` are entries of the config's `tools` (default: all) and Python functions. `tools.schemas`
        describes the tools for a model. `await tools.call_all(reply.tool_calls)` makes the model's calls and
        returns the messages with their results.

        Raises RequestError for an unknown set, ToolError for one that cannot be opened.
        """
        return self._tools.open(sets)

    def function(self, name: str) -> AbstractContextManager[str]:
        """Attribute calls to a function: `with episode.function("search"):`."""
        return set_value(current_function, name)

    def step_reward(self, value: float, reason: str = "", *, agent: str | None = None) -> None:
        """Give a reward for the work since the previous call, by all agents or by one `agent`.

        Raises ValueError if it is not finite.
        """
        reward = self._finite("a step reward", value)
        self._events.append(Event("step_reward", self._recorder.last_index, reward, reason, agent=agent))

    def score(self, name: str, value: float, reason: str | None = None, agent: str | None = None) -> None:
        """Record a score measured inside the run, such as an environment's reward.

        Evaluators of `_type: measured` read it by its name. If each agent has its own score, `agent` names
        it: the function that the agent's calls belong to. A repeated score replaces the earlier one. Raises
        ValueError if it is not finite.
        """
        score = self._finite(f"the score '{name}'", value)
        self._events.append(Event("score", self._recorder.last_index, score, reason or "", name, agent))

    def _finite(self, what: str, value: Any) -> float:
        try:
            result = number(value)
        except ValueError:
            result = math.nan
        if not is_score(result):
            limits = f"a finite number within ±{LARGEST_SCORE:g}"
            raise ValueError(f"{what} must be {limits}, found {value!r} (episode {self.id})")
        return result

    def note(self, text: str) -> None:
        """Write a note into the episode's record, for people."""
        self._events.append(Event("note", self._recorder.last_index, None, text))

    @property
    def events(self) -> tuple[Event, ...]:
        """Step rewards, scores, notes, tool calls and tool logs so far."""
        return tuple(self._events)

    async def answer(self, body: ChatBody, default_model: str | None = None) -> RecordedCompletion:
        """Make the call that an OpenAI request asks for. Raises like `chat`."""
        model = self._recorder.models.choose(
            body.model if body.model in self._recorder.models.engines else default_model
        )

        codec = getattr(innermost(self._recorder.models.engines[model]), "codec", None)

        def heading(name: str) -> AnswerHeader:
            # The id depends only on the request, for code that puts it into a later request.
            head = AnswerHeader(f"chatcmpl-{name.replace('/', '-')}", model, tokens_as_ids=body.tokens_as_ids)
            return head if codec is None else replace(head, bytes_of=codec.grammars.token_bytes)

        def on_delta(name: str, delta: Delta) -> None:
            if body.on_delta is not None:
                body.on_delta(heading(name), delta)

        asked = self._recorder.ask(
            body,
            model=model,
            function=body.function or current_function.get(),
            on_delta=None if body.on_delta is None else self.loop.callback_on_this_loop(on_delta),
        )
        name, call = await self.loop.call(asked)
        assert call.completion is not None
        return heading(name).with_completion(call.completion)

    async def close(self) -> None:
        """End the episode: refuse calls, revoke its key, remove its folder, close its tools."""
        self.loop.close()
        self._recorder.close()
        if self._endpoint is not None:
            self._server.revoke(self._endpoint)
            self._endpoint = None
        self._workplace.remove()
        await self._tools.close()


def _waiting_for(
    method: Callable[Concatenate[Episode, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncEpisode, P], T]:
    """Wrap an episode's method so that it waits for the result."""

    @functools.wraps(method)
    def call(episode: SyncEpisode, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return episode.loop.wait(method(episode._episode, *args, **kwargs))

    return call


class SyncTools:
    """A plain function's open tools: their calls wait for the results."""

    def __init__(self, tools: Tools, loop: EpisodeLoop) -> None:
        self._tools, self._loop = tools, loop
        self.schemas = tools.schemas

    def call(self, call: ToolCall) -> Message:
        """Call a tool as the model asked. Returns the message with its result."""
        return self._loop.wait(self._tools.call(call))

    def call_all(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call several tools at the same time. Returns their messages in the order of the calls."""
        return self._loop.wait(self._tools.call_all(calls))


class SyncEpisode:
    """One run of a workflow that is a plain function: an `Episode` whose calls wait for their answers."""

    def __init__(self, episode: Episode) -> None:
        self.id = episode.id
        self.example: Example = episode.example
        self.generation = episode.generation
        self.random = episode.random
        self.function = episode.function
        self.step_reward = episode.step_reward
        self.score = episode.score
        self.note = episode.note
        self.loop = episode.loop
        self._episode = episode

    chat = _waiting_for(Episode.chat)
    """Ask a model to continue the conversation, and wait for its answer."""

    run = _waiting_for(Episode.run)
    """Run another program to its end."""

    @property
    def folder(self) -> Path:
        """An empty folder for this episode's files."""
        return self._episode.folder

    def openai(self, model: str | None = None) -> OpenAI:
        """Return a real `OpenAI` client whose chat completions are recorded into this episode."""
        from etude.wire.gateway import blocking_recording_client

        episode = self._episode
        if model is not None:
            episode.models.require(model)
        return blocking_recording_client(
            lambda body: episode.answer(body, model), self.loop.wait, episode.answers_given
        )

    @contextlib.contextmanager
    def tools(self, *sets: str | ToolSet | Callable[..., Any]) -> Iterator[SyncTools]:
        """Open tools with `with episode.tools("search") as tools:`; their calls wait for results."""
        opened = self._episode.tools(*sets)
        tools = self.loop.wait(opened.__aenter__())
        try:
            yield SyncTools(tools, self.loop)
        finally:
            if not self.loop.is_over:  # Otherwise the episode has closed them.
                self.loop.wait(opened.__aexit__(None, None, None))

    @property
    def endpoint(self) -> Endpoint:
        """The base URL and key of the recorded models, for code in another process."""
        return self._episode.endpoint
