"""Engines without a model, and waits that no machine is too slow for, shared by tests of several rooms."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion, Usage
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.core.message import Message
from etude.store.facts import read_facts

T = TypeVar("T")


def one_quick(first: Any, *others: Any) -> list[Any]:
    """Values of a parameter: `first` in every run of the tests, the others among the slow ones."""
    tuples = [each if isinstance(each, tuple) else (each,) for each in others]
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in tuples)]


def draws(number: int) -> int:
    """How many examples hypothesis draws: this number in the quick tests, and 2.5 times as many in all."""
    return number * settings().max_examples // 40


def json_values(*, infinite: bool = True) -> st.SearchStrategy[Any]:
    """Draws what JSON can say, and numbers without an end where they are `infinite`."""
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=infinite)
    return st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=10,
    )


def needs(*modules: str) -> pytest.MarkDecorator:
    """A mark for what is skipped without modules. Tests import them, and not all that only collect."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


Answer: TypeAlias = "str | Message | Completion | Exception"

START, END = 1, 2


class ScriptedEngine:
    """Answers what it is told to; token ids and logprobs follow from the request alone.

    `script` is a list of answers in the order of the requests (the last one again and again), or a function
    of the request. An answer is a text, a message, a completion, or an exception to raise. Token ids are the
    bytes of the text between START and END; an episode's earlier tokens are extended as they were sampled.
    """

    def __init__(
        self,
        script: Sequence[Answer] | Callable[[ChatRequest], Answer],
        *,
        log: Path | None = None,
        slowly: bool = False,
    ) -> None:
        """`log` gets a line with the key of each request that was sampled, readable after a kill -9.
        `slowly` gives other tasks a turn before each answer, in an order that depends on the key."""
        self.requests: list[ChatRequest] = []
        self.answered: list[tuple[int, ChatRequest]] = []
        """The same with the version of the weights."""
        self.version = 0
        self.closed = False
        if not callable(script):
            answers = chain(script, repeat(script[-1] if script else ""))
        self._script = script if callable(script) else lambda request: next(answers)
        self._log = None if log is None else os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._slowly = slowly

    async def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        self.answered.append((self.version, request))
        if self._slowly:
            for _ in range(request.key % 7):
                await asyncio.sleep(0)
        answer = self._script(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Completion):
            return answer
        message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        if self._log is not None:
            os.write(self._log, f"{request.key}\n".encode())
        prompt_ids = _prompt_ids(request)
        completion_ids = (*_message_text(message), END)
        random = generator(request.key, "logprobs")
        return Completion(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else "stop",
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=tuple(-random.random() for _ in completion_ids),
            usage=Usage(len(prompt_ids), len(completion_ids)),
            model_version=self.version,
        )

    async def adopt(self, version: ModelVersion) -> None:
        self.version = version.number

    async def close(self) -> None:
        self.closed = True


class EchoEngine(ScriptedEngine):
    """Says the last message back, after a number that follows from the request's key."""

    def __init__(self, *, log: Path | None = None, slowly: bool = False) -> None:
        super().__init__(
            lambda request: f"{request.key % 1000}: {request.messages[-1].get('content')}",
            log=log,
            slowly=slowly,
        )


def tool_call(name: str, arguments: object, *, id: str = "call_0") -> Message:
    """An assistant message that calls a tool."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    wire = {"id": id, "type": "function", "function": {"name": name, "arguments": raw}}
    return {"role": "assistant", "content": None, "tool_calls": [wire]}


def _prompt_ids(request: ChatRequest) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    messages = request.messages
    for call in request.earlier:
        before = call.completion
        assert before is not None and before.prompt_ids is not None and before.completion_ids is not None
        said = (*call.request.messages, before.message)
        if request.messages[: len(said)] == said:
            ids = before.prompt_ids + before.completion_ids
            messages = request.messages[len(said) :]
    for message in messages:
        ids += (START, *_message_text(message), END)
    return (*ids, START)


def _message_text(message: Message) -> bytes:
    text = message.get("content") or ""
    return (text + json.dumps(message["tool_calls"]) if message.get("tool_calls") else text).encode()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once the condition holds; the limit is only there for what never happens."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], T | None], seconds: float = 90.0) -> T:
    """As `until`, in a test without an event loop. Return what holds in the end."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)
    return found


def pass_time(seconds: float) -> None:
    """Set the clock of the running loop on: limits that end within so long end now.

    Those that are to end are then no race with those that are not, however long the machine stands still.
    """
    loop = asyncio.get_running_loop()
    ahead = loop.time() - time.monotonic() + seconds
    loop.time = lambda: time.monotonic() + ahead  # type: ignore[method-assign]


TIMES = frozenset(
    {
        *("timestamp", "seconds", "began", "timed", "started_at", "ended_at"),
        *("collecting_seconds", "training_seconds", "tokens_per_s"),
    }
)
"""The names of fields that have them."""


def without_times(value: Any, *others: str) -> Any:
    """A value of JSON without the fields that have times, and without `others`."""
    if isinstance(value, dict):
        left_out = TIMES.union(others)
        return {key: without_times(each, *others) for key, each in value.items() if key not in left_out}
    return [without_times(each, *others) for each in value] if isinstance(value, list) else value


def read_summary(run: Path) -> dict[str, Any]:
    """The figures of a training that is over."""
    facts = read_facts(run)
    assert facts.ended is not None, "the run is not over"
    return facts.summary.as_json()
