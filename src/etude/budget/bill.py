"""The bill of a run, as its journal has it, and `MeteredEngine`, which counts calls for whom they are made.

The bill has one line for each model, role and part of the run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import quote

from pydantic_core import to_json

from etude.config.component import LlmConfig
from etude.core.call import NO_USAGE, ChatRequest, Completion, Usage
from etude.core.implementations import checked
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.inference.local import OpponentsConfig
from etude.store.journal import Journal
from etude.store.run_folder import TIME_STEP, RunFolder
from etude.wire.retries import Within, counting_charges

_CALLS = "spent/calls/"
_JOBS = "spent/jobs/"


@dataclass(frozen=True, slots=True)
class Line:
    """All that one model took in one role and part of a run, or that a training job did."""

    model: str
    """The entry of `llms`."""
    role: str
    """`agent`, `user`, `judge`, `teacher`, `opponent`, `other`; `training` for a job."""
    phase: str
    """`train/3`, `validation/5`, `eval`; of a job its name."""
    calls: int = 0
    """Calls that the model answered, or charged for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompts that the endpoint had in its cache."""
    completion_tokens: int = 0
    trained_tokens: int = 0
    usd: float = 0.0
    unpriced_tokens: int = 0
    """Tokens of all kinds for which no price was known."""

    @property
    def tokens(self) -> int:
        """Tokens of all kinds."""
        return self.prompt_tokens + self.completion_tokens + self.trained_tokens

    @property
    def key(self) -> str:
        """Where it is in the journal."""
        return line_key(self.model, self.role, self.phase)

    def plus_call(self, usage: Usage, usd: float | None) -> Line:
        """The line with one more call."""
        unpriced = usage.prompt_tokens + usage.completion_tokens if usd is None else 0
        return Line(
            self.model,
            self.role,
            self.phase,
            calls=self.calls + 1,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            trained_tokens=self.trained_tokens,
            usd=self.usd + (usd or 0.0),
            unpriced_tokens=self.unpriced_tokens + unpriced,
        )

    def facts(self) -> dict[str, str]:
        """The facts that tell it from other lines."""
        return {"model": self.model, "role": self.role, "phase": self.phase}

    def stored(self) -> dict[str, str | float]:
        """The line as the journal keeps it."""
        return {**self.facts(), **{name: kept for name in _AMOUNTS if (kept := getattr(self, name))}}

    def as_json(self) -> dict[str, Any]:
        """All fields, with `tokens`."""
        return {**asdict(self), "tokens": self.tokens}


@lru_cache(maxsize=256)
def line_key(model: str, role: str, phase: str) -> str:
    """Where the line with these facts is in the journal."""
    if role == "training":
        return f"{_JOBS}{quote(phase, safe='')}"
    return _CALLS + "/".join(quote(part, safe="") for part in (model, role, phase))


_AMOUNTS = tuple(each.name for each in fields(Line) if each.name not in ("model", "role", "phase"))


def total(lines: Iterable[Line], *, model: str = "", role: str = "", phase: str = "") -> Line:
    """The sum of lines, under the names that are given."""
    lines = list(lines)
    return Line(model, role, phase, **{name: sum(getattr(line, name) for line in lines) for name in _AMOUNTS})


@dataclass(frozen=True, slots=True)
class Bill:
    """All that a run has taken so far."""

    lines: tuple[Line, ...] = ()
    seconds: float = 0.0
    """In which its processes were at work."""

    @property
    def total(self) -> Line:
        """The sum of all lines."""
        return total(self.lines)

    def by(self, *names: str) -> list[Line]:
        """The sums of the lines that agree in `names`: `model`, `role`, `phase`; in their order."""
        groups: dict[tuple[str, ...], list[Line]] = {}
        for line in self.lines:
            groups.setdefault(tuple(getattr(line, name) for name in names), []).append(line)
        return [total(lines, **dict(zip(names, key, strict=True))) for key, lines in sorted(groups.items())]

    def as_json(self) -> dict[str, Any]:
        """The lines, and their sums."""
        amounts = self.total.as_json()
        return {
            "total": {name: amounts[name] for name in (*_AMOUNTS, "tokens")},
            "lines": [line.as_json() for line in self.lines],
            "hours": self.seconds / 3600,
        }


def bill_of(journal: Journal) -> Bill:
    """The bill of a run by its journal. Raises StoreError."""
    lines = tuple(Line(**value) for prefix in (_CALLS, _JOBS) for _, value in journal.scan(prefix))
    return Bill(lines, (journal.get(TIME_STEP) or {}).get("seconds", 0.0))


def read_bill(run: Path) -> Bill:
    """The bill of the run in a folder. Raises StoreError."""
    with RunFolder.read(run) as folder:
        return bill_of(folder.journal)


Role: TypeAlias = Literal["agent", "user", "judge", "teacher", "opponent", "other"]

_EPOCH = re.compile(r"(warm-up|train|validation)/\d+")


@dataclass(frozen=True, slots=True)
class Purpose:
    """Who asks a model, and in which part of a run."""

    role: Role = "other"
    phase: str = ""
    """`train/3`, `validation/5`, `eval`; empty outside of episodes."""


_OTHER = Purpose()
_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default=_OTHER)


def asking_for(role: Role, episode_id: str) -> Within[Purpose]:
    """Have the calls within the block count for a role, and for the part of the run that has the episode."""
    return Within(_PURPOSE, _purpose(role, episode_id))


def restored(purpose: Purpose) -> Within[Purpose]:
    """The same for a purpose that another process has told."""
    return Within(_PURPOSE, purpose)


@lru_cache(maxsize=1024)
def _purpose(role: Role, episode_id: str) -> Purpose:
    match = _EPOCH.match(episode_id)
    return Purpose(role, episode_id.partition("/")[0] if match is None else match[0])


def current_purpose() -> Purpose:
    """The purpose of a call that is made now."""
    return _PURPOSE.get()


_FRAME_TOKENS = 16
"""That a template may put around a message, at most."""
_TEMPLATE_TOKENS = 256
"""That it may put before all of them."""
_PART_TOKENS = 40_000
"""Of a part of a message that is no text, such as an image: what the dearest one takes."""
_ANSWER_TOKENS = 4096
"""Of an answer without any limit, of an engine that has none."""


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


class MeteredEngine(Engine):
    """An engine whose calls are counted, whoever makes them and whoever wrote the engine.

    All that is asked of it but calls is the engine's own; `bare` gives the engine itself.
    """

    def __init__(self, name: str, engine: Engine, account: Account, llms: Mapping[str, LlmConfig]) -> None:
        """`name` is the entry of `llms`."""
        self.metered = engine
        self._name, self._account = name, account
        llm = llms.get(name)
        self._role: Role | None = "opponent" if isinstance(llm, OpponentsConfig) else None
        llm = llms.get(llm.of) if isinstance(llm, OpponentsConfig) else llm
        longest = getattr(llm, "max_tokens", None)
        self._longest = longest if isinstance(longest, int) else None

    @property
    def version(self) -> int:
        """The engine's."""
        return self.metered.version

    async def complete(self, request: ChatRequest) -> Completion:
        """Have the engine sample. Raises WrongReturnError where it gives no completion."""
        most = NO_USAGE
        if self._account.bounds_calls:
            if request.sampling.max_tokens is None and self._longest is not None:
                request = replace(request, sampling=replace(request.sampling, max_tokens=self._longest))
            most = most_tokens(request)

        async def call() -> tuple[Any, Usage, int]:
            value: Any = self.metered.complete(request)
            done = await value if inspect.isawaitable(value) else value
            done = checked(done, self.metered.complete, Engine.complete)
            return done, done.usage, done.model_version

        completion: Completion = await self._counted(most, call)
        return completion

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Have an engine that scores tokens do so."""
        engine: Any = self.metered
        usage = Usage(len(ids), 1)

        async def call() -> tuple[Any, Usage, int]:
            return await engine.score(ids), usage, engine.version

        return tuple(await self._counted(usage, call))

    async def adopt(self, version: ModelVersion) -> None:
        """Have the engine adopt it."""
        await self.metered.adopt(version)

    async def close(self) -> None:
        """Close the engine."""
        await self.metered.close()

    def __getattr__(self, name: str) -> Any:
        """An attribute that only engines of this one's kind have."""
        return getattr(self.metered, name)

    async def _counted(self, most: Usage, call: Callable[[], Awaitable[tuple[Any, Usage, int]]]) -> Any:
        account, name = self._account, self._name
        number = await account.hold(name, most) if account.bounds_calls else None
        usage, version = NO_USAGE, 0
        try:
            with counting_charges() as lost:
                try:
                    result, usage, version = await call()
                finally:
                    usage = usage.plus(lost.usage)
            return result
        finally:
            purpose = current_purpose()
            if self._role is not None:
                purpose = Purpose(self._role, purpose.phase)
            await account.settle(number, name, purpose, usage, version)


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
