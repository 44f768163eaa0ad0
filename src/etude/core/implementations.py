"""Holding every implementation of an interface's methods to what the interface declares, whoever wrote it.

What a method returns is what is declared, and where that is not so, the error names the method, its line and
what it returned. Parts call many of these methods themselves, so no wrapper around a part would see it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from etude.core.data_model import kind_of, number
from etude.core.errors import EtudeError, RequestError

C = TypeVar("C", bound=Callable[..., Any])


def wrap_implementations(cls: type, interface: type) -> None:
    """Hold the methods of the interface that `cls` itself implements to what it declares.

    For `__init_subclass__` of the interface. Methods that `cls` does not define, or leaves abstract, are
    passed over. Raises RequestError for an `async def` of a method that is called without being waited for.
    """
    for name, declared in vars(interface).items():
        own = vars(cls).get(name)
        is_method = inspect.isfunction(declared) and not name.startswith("_")
        if is_method and inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            setattr(cls, name, _held(own, declared))


def _held(own: C, declared: Callable[..., Any]) -> C:
    """`own`, held to what is declared; it is waited for where that is, also where it is a plain `def`."""
    require_plain(own, declared)

    @functools.wraps(own)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checked(called(own, declared, self, *args, **kwargs), own, declared)

    @functools.wraps(own)
    async def held_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = called(own, declared, self, *args, **kwargs)
        return checked(await value if inspect.isawaitable(value) else value, own, declared)

    # They take and give what `own` does.
    return held_async if inspect.iscoroutinefunction(declared) else held  # type: ignore[return-value]


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
