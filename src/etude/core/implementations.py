"""Calling every implementation of a method through its base class, whoever wrote the implementation.

A guarantee that has to hold for a user's subclass as for ours cannot live in a subclass. All implementations
of an interface's methods are wrapped: what they return is what the interface declares, and where that has a
method `around_<method>(proceed, …)`, it is called in their place. `proceed` is the implementation, and the
base class decides what happens before and after it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from etude.core.data_model import kind_of, number
from etude.core.errors import EtudeError, RequestError

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


_LISTS = (list, Sequence)


class WrongReturnError(EtudeError):
    """A part of somebody's returned, or takes, what its interface does not have.

    It is no TrainingError: a job that it concerns may be running.
    """


def require_plain(implementation: Callable[..., Any], declared: Callable[..., Any]) -> None:
    """Raise RequestError for an `async def` of what is called without being waited for."""
    if inspect.iscoroutinefunction(implementation) and not inspect.iscoroutinefunction(declared):
        raise RequestError(
            f"{_place(implementation)} is `async def`, and {declared.__qualname__} is called without being "
            "waited for; write `def`, and wait for nothing in it"
        )


def called(
    implementation: Callable[..., Any], declared: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """The result of the implementation. Raises WrongReturnError where it does not take what it is given."""
    try:
        return implementation(self, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise
        given = inspect.signature(declared).parameters.values()
        parameters = ", ".join(str(each.replace(annotation=each.empty)) for each in given)
        raise WrongReturnError(
            f"{_place(implementation)} is to take what its interface says, ({parameters}): {error}"
        ) from error


def checked(value: Any, implementation: Callable[..., Any], declared: Callable[..., Any]) -> Any:
    """`value` as `declared` says that it is; a number of any kind as a float.

    Raises WrongReturnError that names the implementation, what it returned and what is expected. What a
    method returns that is declared to return None does not matter.
    """
    expected = _declared(inspect.unwrap(declared))
    if expected is types.NoneType and not inspect.isawaitable(value):
        return value
    if _fits(value, expected):
        return number(value) if expected is float else value
    if inspect.iscoroutine(value):
        value.close()
    shown = "None" if value is None else f"{kind_of(value)} ({value!r:.60})"
    missing = " (is a `return` missing?)" if value is None else ""
    raise WrongReturnError(
        f"{_place(implementation)} returned {shown}, and `{_words(expected)}` is expected{missing}"
    )


@functools.cache
def _declared(method: Callable[..., Any]) -> Any:
    # Alone: the types of parameters may be imported for type checkers only. Where these are too, nothing is
    # known but that they are loaded by now.
    written = types.SimpleNamespace(__annotations__={"return": method.__annotations__.get("return", Any)})
    try:
        return get_type_hints(written, {**sys.modules, **method.__globals__})["return"]
    except NameError:
        return Any


def _fits(value: Any, expected: Any) -> bool:
    if expected is Any:
        return True
    if get_origin(expected) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(expected))
    if get_origin(expected) in _LISTS:
        if hasattr(value, "ndim"):
            return bool(value.ndim)  # Numbers of numpy or torch.
        (item,) = get_args(expected)
        is_list = isinstance(value, (list, tuple) if get_origin(expected) is list else Sequence)
        return is_list and not isinstance(value, str) and all(_fits(each, item) for each in value)
    if get_origin(expected) is tuple:
        items = get_args(expected)
        is_tuple = isinstance(value, tuple | list) and len(value) == len(items)
        return is_tuple and all(map(_fits, value, items))
    if get_origin(expected) is set:
        return isinstance(value, Set)
    if expected is float:
        try:
            number(value)
        except ValueError:
            return False
        return True
    if expected is bool and getattr(value, "ndim", None) == 0:
        value = value.item()  # Of numpy or torch.
    return isinstance(value, get_origin(expected) or expected)


def _words(expected: Any) -> str:
    """The declared type as code has it, without the modules: `TrainingJobRef | Skipped`."""
    is_class = isinstance(expected, type) and not get_args(expected)
    return re.sub(r"(?:\w+\.)+|(?<=None)Type", "", expected.__name__ if is_class else str(expected))


def _place(method: Callable[..., Any]) -> str:
    """`parts.py:12: Mine.submit`."""
    name = getattr(method, "__qualname__", repr(method)).rpartition("<locals>.")[2]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return name if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}"
