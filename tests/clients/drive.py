"""Driving a client: its features, each a function of where the model is, and the process that runs them."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

from pydantic import BaseModel

MODULES = ("openai_sdk", "anthropic_sdk", "langchain_agents", "openai_agents", "pydantic_ai_agents")
"""The modules of this folder that drive a library of Python's."""

OPTIONAL = ("claude_code", "codex")
"""Those of programs of npm's, which are driven where they are installed."""

QUESTION = "What is 1 + 2?"
CODING_TASK = "Write the sum of 1 and 2 to answer.txt."


@dataclass(frozen=True, slots=True)
class Target:
    """Where a client finds the model."""

    base_url: str
    api_key: str
    model: str
    takes_any_name: bool = True
    """Whether requests may name a model that is not there, as in episodes."""

    @property
    def anthropic_url(self) -> str:
        """The address as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")


Body: TypeAlias = Callable[[Target], Any]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that users of a client do with it."""

    run: Body
    """Fails by raising; a coroutine function where the client has asyncio."""
    calls: int
    """Calls of the model that it makes at least."""
    extends: bool
    """Whether a call goes on from an earlier one, whose tokens must then be extended."""


@dataclass(slots=True)
class Client:
    """A client library, and its features by the names of their functions."""

    package: str
    """Its name on PyPI or npm."""
    features: dict[str, Feature] = field(default_factory=dict)

    def feature(self, *, calls: int = 1, extends: bool = False) -> Callable[[Body], Body]:
        """Add the decorated function."""

        def decorate(run: Body) -> Body:
            self.features[run.__name__] = Feature(run, calls, extends)
            return run

        return decorate


def load_client(module: str) -> Client:
    """The client that a module of this folder drives. The library itself is not imported."""
    client = import_module(f"tests.clients.{module}").CLIENT
    assert isinstance(client, Client)
    return client


class Sum(BaseModel):
    """The result of an addition."""

    sum: int


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
"""The same as OpenAI's API describes functions."""


def same(left: Any, right: Any) -> None:
    """Raise AssertionError, which says both, when they differ."""
    assert left == right, f"{left!r} is not {right!r}"


def catch(kind: type[Any], call: Callable[[], object]) -> Any:
    """The error of that kind that a call raises; AssertionError when it raises none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


_TRIES = {"endpoint": 1, "server": 3}
"""An episode repeats itself. A server draws at random, and the tiny model may wander: what a client cannot do
fails each time."""


def run_features(module: str, targets: Mapping[str, Mapping[str, Target]]) -> None:
    """Run the features of a client, at each of its targets by side; a line of JSON on each."""
    out = sys.stdout
    sys.stdout = sys.stderr
    logging.getLogger().setLevel(logging.ERROR)
    # Clients keep connections, which belong to a loop.
    with asyncio.Runner() as runner:
        for name, feature in load_client(module).features.items():
            for side, target in targets[name].items():
                for _ in range(_TRIES[side]):
                    error = _run_feature(feature, target, runner)
                    if error is None:
                        break
                out.write(json.dumps({"feature": name, "side": side, "error": error}) + "\n")
                out.flush()


def _run_feature(feature: Feature, target: Target, runner: asyncio.Runner) -> str | None:
    """Why a feature does not work, if it does not."""
    try:
        result = feature.run(target)
        if inspect.iscoroutine(result):
            runner.run(result)
    except Exception as failure:  # noqa: BLE001  whatever a library raises is the outcome
        return "".join(traceback.format_exception(failure, limit=-8))
    return None


def encode(targets: Mapping[str, Mapping[str, Target]]) -> str:
    """The targets as `main` reads them."""
    return json.dumps({n: {side: asdict(t) for side, t in sides.items()} for n, sides in targets.items()})


def main() -> None:
    """`python -m tests.clients.drive MODULE`, the targets on standard input."""
    given = json.load(sys.stdin)
    targets = {n: {side: Target(**t) for side, t in sides.items()} for n, sides in given.items()}
    run_features(sys.argv[1], targets)


if __name__ == "__main__":
    # Clients' modules import this one by its name.
    import_module("tests.clients.drive").main()
