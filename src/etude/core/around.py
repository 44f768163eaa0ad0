"""Calling every implementation of a method through its base class, whoever wrote the implementation.

A guarantee that has to hold for a user's subclass as for ours cannot live in a subclass. All implementations
of an interface's methods are wrapped: what they return is what the interface declares, and where that has a
method `around_<method>(proceed, …)`, it is called in their place. `proceed` is the implementation, and the
base class decides what happens before and after it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from etude.core.returned import called, checked, require_plain

C = TypeVar("C", bound=Callable[..., Any])

_entered: ContextVar[frozenset[tuple[int, str]]] = ContextVar("entered", default=frozenset())
_inside: ContextVar[frozenset[tuple[int, str]]] = ContextVar("inside", default=frozenset())


def wrap_implementations(cls: type, interface: type, *, nested: Collection[str] = ()) -> None:
    """Wrap the methods of the interface that `cls` itself implements.

    For `__init_subclass__` of the base class. Methods that `cls` does not define, or leaves abstract, are
    passed over. Those in `nested` are called so through `super()` too. Raises RequestError for an `async def`
    of a method that is called without being waited for.
    """
    for name, declared in vars(interface).items():
        own = vars(cls).get(name)
        is_method = inspect.isfunction(declared) and not name.startswith(("_", "around_"))
        if is_method and inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            setattr(cls, name, _through(own, declared, nested=name in nested))


def through_base(own: C) -> C:
    """The base class's own implementation, wrapped as those of subclasses are."""
    return _through(own, own)


def _through(own: C, declared: Callable[..., Any], *, nested: bool = False) -> C:
    """`own`, called through `around_<name>` where there is one, and held to what is declared.

    It is waited for where it is declared to be, also where it is a plain `def`. A call that is made from
    within the same method, such as one of `super()`, goes straight through, unless it is `nested`.
    """
    require_plain(own, declared)
    name, is_async = own.__name__, inspect.iscoroutinefunction(declared)

    def proceed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self, name), _noted(_inside, self, name):
            return checked(called(own, declared, self, *args, **kwargs), own, declared)

    async def proceed_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self, name), _noted(_inside, self, name):
            value = called(own, declared, self, *args, **kwargs)
            return checked(await value if inspect.isawaitable(value) else value, own, declared)

    implementation = proceed_async if is_async else proceed

    @functools.wraps(own)
    def through(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not nested and (id(self), name) in _inside.get():
            return own(self, *args, **kwargs)
        is_around = not nested and is_entered(self, name)
        around = None if is_around else getattr(self, f"around_{name}", None)
        if around is None:
            return implementation(self, *args, **kwargs)
        return around(functools.partial(implementation, self), *args, **kwargs)

    @functools.wraps(own)
    async def through_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = through(self, *args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    # They take and give what `own` does.
    return through_async if is_async else through  # type: ignore[return-value]


def is_entered(self: object, name: str) -> bool:
    """Whether this task is within the method already."""
    return (id(self), name) in _entered.get()


def entered(self: object, name: str) -> AbstractContextManager[None]:
    """Have calls of the method go to its implementation, and not through `around_<name>`."""
    return _noted(_entered, self, name)


@contextmanager
def _noted(where: ContextVar[frozenset[tuple[int, str]]], self: object, name: str) -> Iterator[None]:
    token = where.set(where.get() | {(id(self), name)})
    try:
        yield
    finally:
        where.reset(token)
