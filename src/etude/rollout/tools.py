"""An episode's tools: opened, called within their limits, and recorded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from etude.config.component import ToolsConfig
from etude.config.import_path import import_object
from etude.config.registry import config_factory, register_tools
from etude.core.episode import Event, ToolResult, ToolSession, ToolSet, ToolUse
from etude.core.errors import EtudeError, RequestError, ToolError, alternatives, error_words
from etude.core.json_text import plain
from etude.core.keys import content_hash
from etude.core.message import Message, Tool
from etude.core.secrets import mask_secrets
from etude.core.threads import call_any, no_exit
from etude.rollout.recorder import ToolCall
from etude.store.journal import Steps
from etude.wire.request_body import check_conversation

T = TypeVar("T")

_CLOSE_SECONDS = 30.0
"""Seconds for tools to close."""


class PythonFunction:
    """A function or method that a model may call.

    Pydantic's schema of its signature describes it, with the texts of `Field` and the docstring.
    The same schema checks a call's arguments.
    """

    def __init__(self, fn: Any) -> None:
        """Describe `fn`. Raises RequestError if it is not a function, or an annotation has no JSON schema."""
        if not inspect.isroutine(fn):
            raise RequestError(f"a tool must be a dict or a function, found {fn!r:.80}")
        self.name = fn.__name__
        try:
            if "self" in inspect.signature(fn).parameters:
                raise TypeError("it is a method without its object; pass a bound method")
            call: Any = validate_call(fn)
            adapter: TypeAdapter[Any] = TypeAdapter(call)
            schema = adapter.json_schema(schema_generator=_Schema)
        except (PydanticUserError, NameError, AttributeError, TypeError, ValueError, SyntaxError) as error:
            raise RequestError(
                f"function '{self.name}' cannot be described as a tool: {error}; annotate its arguments with "
                f"types that JSON has"
            ) from error
        self.call: Callable[..., Any] = call
        """Calls the function. Raises pydantic's ValidationError for arguments that do not fit."""
        text, said = _read_docstring(inspect.getdoc(fn) or "")
        properties, others = schema.setdefault("properties", {}), schema.pop("additionalProperties", False)
        for name, described in properties.items():
            if "description" not in described and name in said:
                described["description"] = said[name]
        if not isinstance(others, bool):  # By default others are neither mentioned nor ruled out.
            schema["additionalProperties"] = others
        description = {"description": text} if text else {}
        self.tool: Tool = {
            "type": "function",
            "function": {"name": self.name, "parameters": schema, **description},
        }


class _Schema(GenerateJsonSchema):
    """A schema generator without titles, which only cost tokens, and without defaults that JSON lacks."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False."""
        return False


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring of any style into its text and its argument descriptions, each on one line.

    Sections on return values and errors are left out.
    """
    from griffe import Docstring, parse_auto
    from griffe import DocstringSectionKind as Kind

    pieces, descriptions = [], dict[str, str]()
    quietly: Any = {style: {"warnings": False} for style in ("google", "numpy", "sphinx")}
    for section in parse_auto(
        Docstring(docstring), method="max_sections", default="google", per_style_options=quietly
    ):
        match section.kind:
            case Kind.parameters | Kind.other_parameters:
                for each in section.value:
                    descriptions.setdefault(each.name.strip("*`- "), " ".join(each.description.split()))
            case Kind.text:
                pieces.append(section.value)
            case Kind.admonition:
                pieces.append(f"{section.title}: {section.value.contents}")
            case Kind.examples:
                pieces += ["Examples:", *(example for _, example in section.value)]
    return " ".join(" ".join(pieces).split()), descriptions


def describe_tools(tools: Sequence[Tool | Callable[..., Any]] | None) -> tuple[Tool, ...]:
    """Return OpenAI's description of each tool. Dicts stay unchanged; functions are described.

    Raises RequestError for anything else, and for a function that cannot be described.
    """
    described = tuple(tool if isinstance(tool, dict) else _described(tool).tool for tool in tools or ())
    check_conversation((), described)
    return described


_described = functools.lru_cache(maxsize=256)(PythonFunction)


class FunctionTools:
    """Tools that are Python functions, sync or async, described by annotations and docstrings.

    A function's exception is the tool's error, which the model sees. Sync functions run in threads. Raises
    RequestError for a function that cannot be described, and for two of one name.
    """

    forgets = False
    """The program manages a function's memory."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        tools = [PythonFunction(fn) for fn in functions]
        self.tools: tuple[Tool, ...] = tuple(function.tool for function in tools)
        self._functions = {function.name: function for function in tools}
        for name, count in Counter(function.name for function in tools).items():
            if count > 1:
                raise RequestError(f"two of the functions are called '{name}'; each tool needs its own name")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[FunctionTools]:
        """Yield the same functions for every episode."""
        yield self

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a function with arguments that fit its annotations."""
        try:
            with no_exit("the function"):
                value = await call_any(partial(self._functions[name].call, **arguments))
            text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
        except Exception as error:  # noqa: BLE001  the user's function: its error is the tool's answer
            problems = error_words(error)
            # The function itself may validate other data, whose fields the model has not set.
            if isinstance(error, ValidationError) and error.title.rpartition(".")[2] == name:
                problems = "; ".join(
                    f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
                )
            return ToolResult(f"error: {problems}", is_error=True)
        return ToolResult(text)


class FunctionToolsConfig(ToolsConfig, name="functions"):
    """Python functions as tools, described by their annotations and docstrings."""

    functions: list[str] = Field(min_length=1)
    """Set `package.module:name` of each function."""


register_tools(config_type=FunctionToolsConfig)(
    config_factory(lambda config: FunctionTools([import_object(path) for path in config.functions]))
)


@dataclass(eq=False)
class EpisodeTools:
    """One episode's tools: which are open, their calls and their results.

    A call is a journalled step, named by the tool, its arguments and the number of equal calls before. So an
    episode that runs again gets its old results.
    """

    episode_id: str
    sets: Mapping[str, ToolSet]
    journal: Steps
    record: Callable[[Event], None]
    run: Callable[[Coroutine[Any, Any, str]], Awaitable[str]]
    """Runs a coroutine on the run's event loop."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of calls by set name."""

    def __post_init__(self) -> None:
        self._open: list[contextlib.AsyncExitStack] = []
        self._asked: Counter[str] = Counter()

    def find(self, wanted: str | ToolSet | Callable[..., Any]) -> ToolSet:
        """Return a set by name, or a new one for a function. Raises RequestError for an unknown name."""
        if isinstance(wanted, ToolSet):
            return wanted
        if callable(wanted):
            return ToolSet(getattr(wanted, "__name__", type(wanted).__name__), FunctionTools([wanted]))
        if not isinstance(wanted, str) or wanted not in self.sets:
            hint = alternatives(str(wanted), self.sets, otherwise="the config has none")
            raise RequestError(f"there is no tool set '{wanted}' under 'tools'{hint}")
        return self.sets[wanted]

    @contextlib.asynccontextmanager
    async def open(self, wanted: Sequence[str | ToolSet | Callable[..., Any]]) -> AsyncIterator[Tools]:
        """Open the tools of these sets together, and close them at the end, or with the episode."""
        sets = [self.find(each) for each in wanted or self.sets]
        stack = contextlib.AsyncExitStack()
        self._open.append(stack)
        async with stack:
            yield Tools(self, [_OpenSet(each, await _open_session(each, stack)) for each in sets])

    async def close(self) -> None:
        """Close tools that an unfinished agent has left open. An error is noted in the episode."""
        for stack in self._open:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await stack.aclose()
            except Exception as error:  # noqa: BLE001  the tools may be anybody's, and end no run
                text = f"tools that were left open could not be closed: {error_words(error)}"
                self.record(Event("note", -1, None, text))

    async def result(self, opened: _OpenSet, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return a call's result, from the journal or the tool. Raises ToolError if there is none."""
        digest = content_hash([opened.set.name, name, arguments])
        count = self._asked[digest]
        self._asked[digest] += 1
        key = f"{self.episode_id}/tool/{digest}/{count}"
        if (stored := self.journal.get(key)) is not None:
            opened.recorded.append((name, arguments))
            return ToolResult(**stored)
        async with opened.catching_up:  # The session may not know recorded calls.
            while opened.set.source.forgets and opened.recorded:
                await opened.call(*opened.recorded[0])
                del opened.recorded[0]
        result = await opened.call(name, arguments)
        await self.journal.put(key, asdict(result))
        return result


async def _open_session(tools: ToolSet, stack: contextlib.AsyncExitStack) -> ToolSession:
    """Open a set of tools until the stack is closed. Raises ToolError if that fails."""
    try:
        with no_exit("it"):
            return await stack.enter_async_context(tools.source.open())
    except EtudeError:
        raise
    except Exception as error:
        raise ToolError(f"the tools '{tools.name}' cannot be opened: {error_words(error)}") from error


@dataclass
class _OpenSet:
    """One open set of tools."""

    set: ToolSet
    session: ToolSession
    recorded: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Calls with results from the journal, which the session does not know."""
    catching_up: asyncio.Lock = field(default_factory=asyncio.Lock)

    def tools(self) -> dict[str, Tool]:
        """Return the offered tools, by the names that the model sees. Raises RequestError."""
        only, offered = self.set.only, {}
        for tool in self.session.tools:
            function = tool["function"]
            if only is None or function["name"] in only:
                name = self.set.prefix + function["name"]
                offered[name] = {**tool, "function": {**function, "name": name}}
        known = [tool["function"]["name"] for tool in self.session.tools]
        for name in only or ():
            if name not in known:
                raise RequestError(
                    f"{self.set.path}.only: there is no tool '{name}'{alternatives(name, known)}"
                )
        return offered

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return the tool's answer, cut to its limit. Raises ToolError if there is none in time."""
        limits = self.set.limits
        try:
            async with asyncio.timeout(limits.call_timeout) as clock:
                with no_exit("it"):
                    result = await self.session.call(name, arguments)
        except ToolError:
            raise
        except Exception as error:
            reason = f"gave no answer: {error_words(error)}"
            if isinstance(error, TimeoutError) and clock.expired():
                key = f"{self.set.path or self.set.name}.call_timeout"
                reason = f"gave no answer within {limits.call_timeout:g} s; raise {key} if it needs longer"
            raise ToolError(f"tool '{name}' of '{self.set.name}' {reason}") from error
        if result.is_error:
            # Before the model reads it, so that the recorded text is the text that the model saw.
            result = replace(result, text=mask_secrets(result.text))
        if len(result.text) > limits.max_characters:
            note = f"… (the first {limits.max_characters} of {len(result.text)} characters)"
            return replace(result, text=result.text[: limits.max_characters] + note)
        return result


class Tools:
    """An episode's open tools: `async with episode.tools("search") as tools:`."""

    def __init__(self, episode: EpisodeTools, opened: Sequence[_OpenSet]) -> None:
        self._episode = episode
        self._owners: dict[str, _OpenSet] = {}
        self.schemas: list[Tool] = []
        """The tools in OpenAI's format, for `episode.chat(tools=…)` or for a client."""
        for each in opened:
            for name, tool in each.tools().items():
                if name in self._owners:
                    first = self._owners[name].set.name
                    raise RequestError(
                        f"'{first}' and '{each.set.name}' both have a tool '{name}'; give one of the sets a "
                        f"prefix: `tools: {{{each.set.name}: {{prefix: {each.set.name}_, …}}}}`"
                    )
                self._owners[name] = each
                self.schemas.append(tool)

    async def call(self, call: ToolCall) -> Message:
        """Call a tool as the model asked. Returns the message with its result, to append to the conversation.

        The model sees its own mistakes and a tool's errors. Raises ToolError if the tool has no answer. Then
        the episode fails, unless the agent catches the error.
        """
        if not isinstance(call, ToolCall):
            raise RequestError(
                f"a tool's call is an etude.ToolCall, as in `reply.tool_calls`, found {call!r:.80}"
            )
        return call.result(await self._episode.run(self._text(call)))

    async def call_all(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call several tools at the same time. Returns their messages in the order of the calls.

        Raises ToolError like `call`, once all calls have ended.
        """
        return await gather_results(map(self.call, calls))

    async def _text(self, call: ToolCall) -> str:
        """Return a call's result, or why it is refused, in words for the model."""
        opened, refusal = self._owners.get(call.name), ""
        if opened is None:
            refusal = f"error: there is no tool '{call.name}'; tools: {', '.join(self._owners)}"
        elif call.arguments is None:
            refusal = "error: the arguments must be a JSON object"
        elif self._episode.counts[opened.set.name] >= (most := opened.set.limits.max_calls):
            refusal = f"error: all {most} calls of these tools are made; go on without them"
        source = opened.set.name if opened else ""
        outcome = "refused" if refusal else "failed"
        use = ToolUse(source, call.name, call.arguments, refusal, outcome, began=time.time())
        if refusal or opened is None or call.arguments is None:
            self._episode.record(Event("tool", -1, tool=use))
            return use.result
        self._episode.counts[opened.set.name] += 1
        begun = time.perf_counter()
        try:
            name = call.name.removeprefix(opened.set.prefix)
            result = await self._episode.result(opened, name, call.arguments)
            use = replace(use, result=result.text, outcome="error" if result.is_error else "ok")
        except BaseException as error:
            use = replace(use, result=str(error) if isinstance(error, ToolError) else error_words(error))
            raise
        finally:
            self._episode.record(Event("tool", -1, tool=replace(use, seconds=time.perf_counter() - begun)))
        return use.result


async def gather_results(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all calls. Errors are raised once all have ended, so no result is lost."""
    results: list[T] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
