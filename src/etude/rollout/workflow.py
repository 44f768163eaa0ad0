"""The workflow: the user's agent code, and the named parts of it that training can target."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, overload

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import WorkflowConfig
from etude.config.import_path import import_object, order_by_name, where_defined
from etude.config.registry import register_workflow
from etude.core.episode import WORKFLOW, ToolSet
from etude.core.errors import RequestError
from etude.wire.retries import ContextValue

Fn = TypeVar("Fn", bound=Callable[..., Any])

_PARAMETERS = ("example", "episode")

current_function: ContextVar[str] = ContextVar("etude_function", default=WORKFLOW)
"""The function that model calls made here belong to."""


@dataclass(frozen=True)
class Workflow:
    """Agent code: a sync or async function of an example and an episode that returns the output.

    A sync function runs in a thread, with a `SyncEpisode`.
    """

    name: str
    fn: Callable[..., Any]
    timeout: float | None = None
    """Seconds that an episode may take; None leaves this to the config."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    tool_sets: tuple[ToolSet, ...] = ()
    """Tools in addition to the config's. `etude check` opens them."""

    def check(self, *, complete: bool = False) -> None:
        """Raise RequestError if the function cannot be called with an example and an episode.

        This is not checked at creation, so a wrong function does not stop its module from being imported.
        Missing further arguments are only known once the config has given its own (`complete`).
        """
        if not callable(self.fn) or isinstance(self.fn, type):
            raise RequestError(
                f"a workflow must be a function of an example and an episode, found {self.fn!r:.80}"
            )
        try:
            check_options(self.name, self.timeout)
        except ValueError as error:
            raise RequestError(f"{self.where}: workflow '{self.name}': {error}") from None
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return  # A function written in C: the call will show whether it fits.
        try:
            (signature.bind if complete else signature.bind_partial)(None, None, **self.arguments)
            order_by_name(signature, _PARAMETERS)
        except TypeError as error:
            expected = ", ".join(("example", "episode", *self.arguments))
            raise RequestError(
                f"{self.where}: workflow '{self.name}' is called with ({expected}), "
                f"but takes {signature}: {error}"
            ) from error

    def start(self, example: Any, episode: Any) -> Any:
        """Call the function with the example, the episode and the arguments, in the order of its names."""
        values = {"example": example, "episode": episode}
        return self.fn(*(values[name] for name in self._order), **self.arguments)

    @functools.cached_property
    def _order(self) -> tuple[str, ...]:
        try:
            return order_by_name(inspect.signature(self.fn), _PARAMETERS)
        except (TypeError, ValueError):
            return _PARAMETERS  # A function written in C.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self.fn(*args, **kwargs)

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, decorated or not."""
        call = getattr(self.fn, "__call__", None)  # noqa: B004  the called method itself is needed
        return inspect.iscoroutinefunction(inspect.unwrap(self.fn)) or inspect.iscoroutinefunction(call)

    @property
    def where(self) -> str:
        """The function's `file:line`, if known."""
        return where_defined(self.fn)


def check_options(name: Any, timeout: Any) -> None:
    """Raise ValueError for an impossible option of a decorator. None stands for its default."""
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"a name is text, found {name!r:.80}")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ValueError(f"timeout must be more than 0 s, found {timeout!r:.80}")


@overload
def workflow(fn: Callable[..., Any], /) -> Workflow: ...


@overload
def workflow(
    *, name: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], Workflow]: ...


def workflow(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: float | None = None
) -> Workflow | Callable[[Callable[..., Any]], Workflow]:
    """Decorate a function `fn(example, episode)`, sync or async, as the agent to train.

    Its return value is the episode's output, which must be JSON: text, numbers, lists, dicts, pydantic
    models, dataclasses. `timeout` is in seconds per episode. The function's parameters are checked when it is
    used.
    """

    if fn is None:
        return lambda fn: Workflow(_name(fn) if name is None else name, fn, timeout)
    return Workflow(_name(fn) if name is None else name, fn, timeout)


def as_workflow(obj: Any, *, arguments: Mapping[str, Any] | None = None) -> Workflow:
    """Return a decorated or plain function as a workflow, with further arguments.

    Raises RequestError if it is not a function, or does not take these arguments.
    """
    agent = obj if isinstance(obj, Workflow) else Workflow(_name(obj), obj)
    if arguments:
        agent = replace(agent, arguments={**agent.arguments, **arguments})
    agent.check()
    return agent


class FunctionWorkflowConfig(WorkflowConfig, name="function"):
    """Agent code named by an import path."""

    function: str
    """Set `package.module:name` of the function, decorated or plain."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Set further keyword arguments of the function."""


@register_workflow(config_type=FunctionWorkflowConfig)
async def function_workflow(config: FunctionWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build the workflow. Raises RequestError if the function is not found or does not fit."""
    yield as_workflow(import_object(config.function), arguments=config.arguments)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


class FunctionScope(ContextValue[str]):
    """Attributes model calls made inside to the named function, with `with` or `async with`."""

    def __init__(self, name: str) -> None:
        super().__init__(current_function, name)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__()


@overload
def function(fn: Fn, /) -> Fn: ...


@overload
def function(*, name: str) -> Callable[[Fn], Fn]: ...


def function(fn: Fn | None = None, /, *, name: str | None = None) -> Fn | Callable[[Fn], Fn]:
    """Decorate a function of an agent: model calls made inside it belong to it.

    `@etude.function` takes the function's own name, `@etude.function(name="search")` another one.
    `finetuning.target_functions` lists these names.
    """
    return (lambda fn: _copy_with_name(fn, name)) if fn is None else _copy_with_name(fn, name)


def _copy_with_name(fn: Fn, name: str | None) -> Fn:
    label = name or fn.__name__

    @functools.wraps(fn)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        with FunctionScope(label):
            return await fn(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with FunctionScope(label):
            return fn(*args, **kwargs)

    return cast("Fn", call_async if inspect.iscoroutinefunction(fn) else call)
