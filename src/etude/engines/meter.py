"""`MeteredEngine`: wraps an engine and charges each call to its caller."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, Self, TypeAlias

from pydantic import BaseModel, StrictInt, ValidationError, model_validator
from pydantic_core import to_json

from etude.config.component import LlmConfig
from etude.core.call import NO_USAGE, ChatRequest, Completion, Usage
from etude.core.data_model import list_faults
from etude.core.interfaces import Engine, WrongReturnError, check_return, find_place
from etude.core.job import ModelVersion
from etude.core.message import Message
from etude.core.threads import set_value
from etude.core.training_rows import Logprob, TokenId
from etude.engines.local import OpponentsConfig
from etude.wire.retries import count_retries

Role: TypeAlias = Literal["agent", "user", "judge", "teacher", "opponent", "other"]

_EPOCH = re.compile(r"(warm-up|train|validation)/\d+")


@dataclass(frozen=True, slots=True)
class Purpose:
    """Who asks a model, and in which part of a run."""

    role: Role = "other"
    phase: str = ""
    """`train/3`, `validation/5`, `eval`; empty outside episodes."""


_OTHER = Purpose()
_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default=_OTHER)


def asking_for(role: Role, episode_id: str) -> AbstractContextManager[Purpose]:
    """Charge the block's calls to a role, and to the part of the run that has the episode."""
    return set_value(_PURPOSE, _purpose(role, episode_id))


def use_purpose(purpose: Purpose) -> AbstractContextManager[Purpose]:
    """Charge the block's calls to a purpose."""
    return set_value(_PURPOSE, purpose)


@lru_cache(maxsize=1024)
def _purpose(role: Role, episode_id: str) -> Purpose:
    match = _EPOCH.match(episode_id)
    return Purpose(role, episode_id.partition("/")[0] if match is None else match[0])


def current_purpose() -> Purpose:
    """Return the purpose of a call made now."""
    return _PURPOSE.get()


_TEMPLATE_TOKENS = 256
"""The most tokens that a template puts before all messages."""
_ANSWER_TOKENS = 4096
"""Tokens of an answer without a limit, from an engine that has no limit either."""


class Account(Protocol):
    """Where calls are counted: the run's ledger, or its proxy in another process."""

    @property
    def reserves_calls(self) -> bool:
        """Whether calls need a reservation."""

    async def hold(self, model: str, most: Usage) -> int:
        """Reserve like `Ledger.hold`."""

    async def settle(self, number: int | None, model: str, purpose: Purpose, usage: Usage) -> None:
        """Count like `Ledger.settle`."""


class _Answer(BaseModel, from_attributes=True):
    """The parts of a completion that any engine must return, also a user's."""

    message: Message
    prompt_ids: Sequence[TokenId] | None
    completion_ids: Sequence[TokenId] | None
    logprobs: Sequence[Logprob] | None
    model_version: StrictInt

    @model_validator(mode="after")
    def _logprobs_are_of_the_tokens(self) -> Self:
        ids, logprobs = self.completion_ids, self.logprobs
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} completion_ids")
        return self


class MeteredEngine(Engine):
    """An engine that counts the calls of any other engine.

    All other attributes are the wrapped engine's. `metered` is the wrapped engine.
    """

    def __init__(self, name: str, engine: Engine, account: Account, llms: Mapping[str, LlmConfig]) -> None:
        """Wrap `engine`, the entry `name` of `llms`."""
        self.metered = engine
        self._name, self._account = name, account
        llm = llms.get(name)
        self._role: Role | None = "opponent" if isinstance(llm, OpponentsConfig) else None
        llm = llms.get(llm.of) if isinstance(llm, OpponentsConfig) else llm
        longest = getattr(llm, "max_tokens", None)
        self._longest = longest if isinstance(longest, int) else None

    @property
    def version(self) -> int:
        """The wrapped engine's version."""
        return self.metered.version

    async def complete(self, request: ChatRequest) -> Completion:
        """Have the engine sample. Raises WrongReturnError if it returns no completion."""
        most = NO_USAGE
        if self._account.reserves_calls:
            if request.sampling.max_tokens is None and self._longest is not None:
                request = replace(request, sampling=replace(request.sampling, max_tokens=self._longest))
            most = most_tokens(request)

        async def call() -> tuple[Any, Usage]:
            value: Any = self.metered.complete(request)
            done = await value if inspect.isawaitable(value) else value
            done = check_return(done, self.metered.complete, Engine.complete)
            try:
                _Answer.model_validate(done)
            except ValidationError as error:
                place = find_place(self.metered.complete)
                raise WrongReturnError(f"{place} returned a Completion with {list_faults(error)}") from None
            return done, done.usage

        completion: Completion = await self._count_call(most, call)
        return completion

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Have the engine score tokens, if it can."""
        engine: Any = self.metered
        usage = Usage(len(ids), 1)

        async def call() -> tuple[Any, Usage]:
            return await engine.score(ids), usage

        return tuple(await self._count_call(usage, call))

    async def adopt(self, version: ModelVersion) -> None:
        """Have the engine adopt the version."""
        await self.metered.adopt(version)

    async def close(self) -> None:
        """Close the engine."""
        await self.metered.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the wrapped engine has."""
        return getattr(self.metered, name)

    async def _count_call(self, most: Usage, call: Callable[[], Awaitable[tuple[Any, Usage]]]) -> Any:
        account, name = self._account, self._name
        number = await account.hold(name, most) if account.reserves_calls else None
        usage = NO_USAGE
        with count_retries() as lost:
            try:
                result, usage = await call()
                return result
            finally:
                purpose = current_purpose()
                if self._role is not None:
                    purpose = Purpose(self._role, purpose.phase)
                await account.settle(number, name, purpose, usage.plus(lost.charged))


def most_tokens(request: ChatRequest) -> Usage:
    """Return the most tokens that a call can take. A token stands for at least one byte of JSON."""
    if isinstance(request.prompt, tuple):
        prompt = len(request.prompt)
    elif request.prompt is not None:
        prompt = len(request.prompt.encode())
    else:
        contents = [request.messages, request.tools]
        prompt = len(to_json(contents, fallback=str, inf_nan_mode="strings")) + _TEMPLATE_TOKENS
    return Usage(prompt, request.sampling.max_tokens or _ANSWER_TOKENS)
