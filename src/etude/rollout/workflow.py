"""The workflow: the user's agent code, as the harness holds it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, overload

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.import_path import import_object, where_defined
from etude.config.registry import register_workflow
from etude.core.errors import RequestError
from etude.rollout.function import function

if TYPE_CHECKING:
    from etude.config.builder import Builder

__all__ = ["FunctionWorkflowConfig", "Workflow", "as_workflow", "function", "function_workflow", "workflow"]


@dataclass(frozen=True)
class Workflow:
    """Agent code: a sync or async function of an example and an episode that returns the output.

    A sync function runs in a thread, and is handed a `SyncEpisode`.
    """

    name: str
    fn: Callable[..., Any]
    timeout: float | None = None
    """Seconds that an episode may take; None leaves it to the config."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""

    def check(self) -> None:
        """Raises RequestError when the function cannot be called with an example and an episode.

        Not when the workflow is made: a function that does not fit must not keep the rest of its module
        from being imported. Whether further arguments are missing is known when the config has given them.
        """
        if not callable(self.fn) or isinstance(self.fn, type):
            raise RequestError(
                f"a workflow must be a function of an example and an episode, found {self.fn!r:.80}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise RequestError(
                f"{self.where}: workflow '{self.name}': timeout must be more than 0 s, found {self.timeout}"
            )
        self._check_call(inspect.Signature.bind_partial)

    def check_complete(self) -> None:
        """Raises RequestError when the function cannot be called with what it is given."""
        self.check()
        self._check_call(inspect.Signature.bind)

    def _check_call(self, bind: Callable[..., object]) -> None:
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return  # Written in C: whether it fits will show.
        try:
            bind(signature, None, None, **self.arguments)
        except TypeError as error:
            expected = ", ".join(("example", "episode", *self.arguments))
            raise RequestError(
                f"{self.where}: workflow '{self.name}' is called with ({expected}), "
                f"and takes {signature}: {error}"
            ) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self.fn(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        call = getattr(self.fn, "__call__", None)  # noqa: B004  not whether it is callable, but what is called
        return inspect.iscoroutinefunction(inspect.unwrap(self.fn)) or inspect.iscoroutinefunction(call)

    @property
    def where(self) -> str:
        """`file:line` of the function, where that is known."""
        return where_defined(self.fn)


@overload
def workflow(fn: Callable[..., Any], /) -> Workflow: ...


@overload
def workflow(
    *, name: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], Workflow]: ...


def workflow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> Workflow | Callable[[Callable[..., Any]], Workflow]:
    """Decorate a function `fn(example, episode)`, sync or async, as the agent to be trained.

    Its return value is the episode's output, which must be JSON: text, numbers, lists, dicts, pydantic
    models, dataclasses. `timeout` is in seconds per episode. Whether the function takes an example and
    an episode is checked when it is used.
    """

    def decorate(fn: Callable[..., Any]) -> Workflow:
        return Workflow(name or _name(fn), fn, timeout)

    return decorate if fn is None else decorate(fn)


def as_workflow(
    obj: Any, *, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
) -> Workflow:
    """The workflow that a decorated or plain function stands for, with what is given set on it.

    Raises RequestError when it is no function, or does not take these arguments.
    """
    agent = obj if isinstance(obj, Workflow) else Workflow(_name(obj), obj)
    if timeout is not None:
        agent = replace(agent, timeout=timeout)
    if arguments:
        agent = replace(agent, arguments={**agent.arguments, **arguments})
    agent.check()
    return agent


class FunctionWorkflowConfig(WorkflowConfig, name="function"):
    """Agent code named by an import path."""

    function: str = Field(description="`package.module:name` of the function, decorated or plain.")
    timeout: Annotated[float | None, CHANGEABLE] = Field(
        default=None, gt=0, description="Seconds that an episode may take."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the function."
    )


@register_workflow(config_type=FunctionWorkflowConfig)
async def function_workflow(config: FunctionWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises RequestError when the function is not found or does not fit."""
    yield as_workflow(import_object(config.function), arguments=config.arguments, timeout=config.timeout)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
