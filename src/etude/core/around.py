"""Calling every implementation of a method through its base class, whoever wrote the implementation.

A guarantee that has to hold for a user's subclass as for ours cannot live in a subclass. A base class that
names a method here has all implementations of it called as `self.around_<method>(proceed, …)`; `proceed`
is the implementation, and the base class decides what happens before and after it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])

_entered: ContextVar[frozenset[tuple[int, str]]] = ContextVar("entered", default=frozenset())


def wrap_implementations(cls: type, *names: str) -> None:
    """Have the methods that `cls` itself implements called through `around_<name>`.

    For `__init_subclass__` of the base class. Names that `cls` does not define, or leaves abstract, are
    passed over.
    """
    for name in names:
        own = vars(cls).get(name)
        if inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            setattr(cls, name, through_base(own))


def through_base(own: C) -> C:
    """`own` as a method that is called through `around_<name>`; of a base class's own implementation.

    A call that is made from within the same method, such as one of `super()`, goes straight through.
    """
    name = own.__name__

    def proceed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self, name):
            return own(self, *args, **kwargs)

    async def proceed_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self, name):
            return await own(self, *args, **kwargs)

    is_async = inspect.iscoroutinefunction(own)
    implementation = proceed_async if is_async else proceed

    @functools.wraps(own)
    def through(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_entered(self, name):
            return own(self, *args, **kwargs)
        return getattr(self, f"around_{name}")(functools.partial(implementation, self), *args, **kwargs)

    @functools.wraps(own)
    async def through_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await through(self, *args, **kwargs)

    # They take and give what `own` does.
    return through_async if is_async else through  # type: ignore[return-value]


def is_entered(self: object, name: str) -> bool:
    """Whether this task is within the method already."""
    return (id(self), name) in _entered.get()


@contextmanager
def entered(self: object, name: str) -> Iterator[None]:
    """Have calls of the method go straight to its implementation."""
    token = _entered.set(_entered.get() | {(id(self), name)})
    try:
        yield
    finally:
        _entered.reset(token)
