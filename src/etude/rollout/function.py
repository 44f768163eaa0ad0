"""Naming the parts of an agent, so that training can be aimed at some of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar, overload

from etude.core.episode import WORKFLOW

_current: ContextVar[str] = ContextVar("etude_function", default=WORKFLOW)

Fn = TypeVar("Fn", bound=Callable[..., Any])


def current_function() -> str:
    """The function that model calls made here belong to."""
    return _current.get()


class FunctionScope:
    """Model calls made inside belong to the named function. Use it with `with` or `async with`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tokens: list[Token[str]] = []

    def __enter__(self) -> None:
        self._tokens.append(_current.set(self._name))

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())

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
    These are the names that `finetuning.target_functions` lists.
    """

    def decorate(fn: Fn) -> Fn:
        label = name or fn.__name__
        wrapper: Any
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with FunctionScope(label):
                    return await fn(*args, **kwargs)
        else:

            @functools.wraps(fn)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with FunctionScope(label):
                    return fn(*args, **kwargs)

        typed: Fn = wrapper
        return typed

    return decorate if fn is None else decorate(fn)
