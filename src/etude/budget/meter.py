"""The meter: has every call of an engine counted, whoever makes it and whoever wrote the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from pydantic_core import to_json

from etude.budget.purpose import Purpose, current_purpose
from etude.config.component import LlmConfig
from etude.core.call import NO_USAGE, ChatRequest, Completion, Usage
from etude.core.errors import RequestError
from etude.core.implementations import checked
from etude.core.interfaces import Engine
from etude.core.within import Within
from etude.inference.opponents_config import OpponentsConfig
from etude.wire.attempts import counting_charges

_FRAME_TOKENS = 16
"""That a template may put around a message, at most."""
_TEMPLATE_TOKENS = 256
"""That it may put before all of them."""
_PART_TOKENS = 40_000
"""Of a part of a message that is no text, such as an image: what the dearest one takes."""
_ANSWER_TOKENS = 4096
"""Of an answer without any limit, of an engine that has none."""

_INSIDE: ContextVar[frozenset[int]] = ContextVar("inside_metered_engines", default=frozenset())


class Account(Protocol):
    """Where calls are counted: the run's ledger, or the way to it from another process."""

    @property
    def bounds_calls(self) -> bool:
        """Whether calls have to be held room for."""

    async def hold(self, model: str, most: Usage) -> int:
        """As `Ledger.hold`."""

    async def settle(
        self, number: int | None, model: str, purpose: Purpose, usage: Usage, version: int
    ) -> None:
        """As `Ledger.settle`."""


@contextmanager
def metered(name: str, engine: Any, account: Account, llms: Mapping[str, LlmConfig]) -> Iterator[None]:
    """Have the calls of the engine of an entry of `llms` counted, as long as this is open.

    The engine stays the object that it is, since others ask what it can do: its methods `complete` and
    `score` are replaced. Raises RequestError for an engine that does not allow that.
    """
    longest = _longest_answer(llms, name)
    role_of = _role_of(llms.get(name))
    complete: Callable[[ChatRequest], Coroutine[Any, Any, Completion]] = engine.complete

    async def counted_complete(request: ChatRequest) -> Any:
        most = NO_USAGE
        if account.bounds_calls:
            if request.sampling.max_tokens is None and longest is not None:
                request = replace(request, sampling=replace(request.sampling, max_tokens=longest))
            most = most_tokens(request)
        return await _counted(
            name,
            engine,
            account,
            most,
            role_of,
            lambda: _answer(complete, request),
            lambda done: (done.usage, done.model_version),
        )

    methods: dict[str, Callable[..., Any]] = {"complete": counted_complete}
    if (score := getattr(engine, "score", None)) is not None:

        async def counted_score(ids: Sequence[int]) -> tuple[float, ...]:
            usage, version = Usage(len(ids), 1), engine.version
            return tuple(
                await _counted(
                    name, engine, account, usage, role_of, lambda: score(ids), lambda _: (usage, version)
                )
            )

        methods["score"] = counted_score
    own = {method: vars(engine)[method] for method in methods if method in getattr(engine, "__dict__", ())}
    try:
        for method, counted in methods.items():
            object.__setattr__(engine, method, counted)
    except AttributeError:
        raise RequestError(
            f"llms.{name}: the calls of {type(engine).__name__} cannot be counted, since its `complete` "
            "cannot be replaced; leave out its `__slots__`"
        ) from None
    try:
        yield
    finally:
        for method in methods:
            object.__delattr__(engine, method)
            if method in own:
                object.__setattr__(engine, method, own[method])


async def _answer(
    complete: Callable[[ChatRequest], Coroutine[Any, Any, Completion]], request: ChatRequest
) -> Any:
    """The completion of an engine that may be anybody's. Raises WrongReturnError for what is none."""
    value: Any = complete(request)
    return checked(await value if inspect.isawaitable(value) else value, complete, Engine.complete)


async def _counted(
    name: str,
    engine: Engine,
    account: Account,
    most: Usage,
    role_of: Callable[[Purpose], Purpose],
    call: Callable[[], Coroutine[Any, Any, Any]],
    usage_of: Callable[[Any], tuple[Usage, int]],
) -> Any:
    inside = _INSIDE.get()
    if id(engine) in inside:
        return await call()
    number = await account.hold(name, most) if account.bounds_calls else None
    usage, version = NO_USAGE, 0
    try:
        with Within(_INSIDE, inside | {id(engine)}), counting_charges() as lost:
            try:
                result = await call()
                usage, version = usage_of(result)
            finally:
                usage = usage.plus(lost.usage)
        return result
    finally:
        await account.settle(number, name, role_of(current_purpose()), usage, version)


def most_tokens(request: ChatRequest) -> Usage:
    """The tokens that a call can take at most: a token of text stands for at least one byte of it."""
    if isinstance(request.prompt, tuple):
        prompt = len(request.prompt)
    elif request.prompt is not None:
        prompt = len(request.prompt.encode())
    else:
        parts = [_without_parts(message) for message in request.messages]
        others = sum(count for _, count in parts)
        text = to_json([message for message, _ in parts], fallback=str, inf_nan_mode="strings")
        tools = to_json(request.tools, fallback=str) if request.tools else b""
        frames = _FRAME_TOKENS * (len(parts) + len(request.tools)) + _TEMPLATE_TOKENS
        prompt = len(text) + len(tools) + frames + others * _PART_TOKENS
    return Usage(prompt, request.sampling.max_tokens or _ANSWER_TOKENS)


def _without_parts(message: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The message without parts that are no text, and how many these are."""
    content = message.get("content")
    if not isinstance(content, list):
        return message, 0
    texts = [part for part in content if not isinstance(part, Mapping) or part.get("type") == "text"]
    return {**message, "content": texts}, len(content) - len(texts)


def _longest_answer(llms: Mapping[str, LlmConfig], name: str) -> int | None:
    llm = llms.get(name)
    llm = llms.get(llm.of) if isinstance(llm, OpponentsConfig) else llm
    longest = getattr(llm, "max_tokens", None)
    return longest if isinstance(longest, int) else None


def _role_of(llm: LlmConfig | None) -> Callable[[Purpose], Purpose]:
    """The purpose that a call counts for: that of an opponent always for one."""
    if isinstance(llm, OpponentsConfig):
        return lambda purpose: Purpose("opponent", purpose.phase)
    return lambda purpose: purpose
