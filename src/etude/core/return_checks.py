"""Checks that every implementation of an interface returns what the interface declares, also a user's.

Otherwise the error names the method, its line and the value that it returned. Parts call many of these
methods themselves, so a wrapper around a part would not see the calls.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from etude.core.data_model import name_type, number
from etude.core.errors import EtudeError, RequestError

C = TypeVar("C", bound=Callable[..., Any])


def wrap_implementations(cls: type, *interfaces: type) -> None:
    """Wrap the methods that `cls` itself defines and the first of the interfaces declares, so that results
    are checked. Raises RequestError for an `async def` where the interface's method is not awaited."""
    methods = {name: method for interface in reversed(interfaces) for name, method in vars(interface).items()}
    for name, declared in methods.items():
        own = vars(cls).get(name)
        is_method = inspect.isfunction(declared) and not name.startswith("_")
        if is_method and inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            setattr(cls, name, _wrap_method(own, declared))


def _wrap_method(own: C, declared: Callable[..., Any]) -> C:
    """Return `own` with checks. It is async if `declared` is, even if `own` is a plain `def`."""
    is_awaited = inspect.iscoroutinefunction(declared)
    if inspect.iscoroutinefunction(own) and not is_awaited:
        raise RequestError(
            f"{_place(own)} is `async def`, and {declared.__qualname__} is not awaited; "
            "write `def`, and await nothing in it"
        )

    @functools.wraps(own)
    def call_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        return check_return(own(self, *args, **kwargs), own, declared)

    @functools.wraps(own)
    async def held_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = own(self, *args, **kwargs)
        return check_return(await value if inspect.isawaitable(value) else value, own, declared)

    # The wrappers have the signature of `own`.
    return held_async if is_awaited else call_and_check  # type: ignore[return-value]


_LISTS = (list, Sequence)


class WrongReturnError(EtudeError):
    """A user's part returned a value that its interface does not declare.

    It is no TrainingError, because the job that it concerns may still be running.
    """


def check_return(value: Any, implementation: Callable[..., Any], declared: Callable[..., Any]) -> Any:
    """Return `value` if it has the type that `declared` returns; any kind of number as a float. Raises
    WrongReturnError. If `declared` returns None, any value but an awaitable is accepted."""
    expected = _declared_return(inspect.unwrap(declared))
    if expected is types.NoneType and not inspect.isawaitable(value):
        return value
    if _fits(value, expected):
        return number(value) if expected is float else value
    if inspect.iscoroutine(value):
        value.close()
    shown = "None" if value is None else f"{name_type(value)} ({value!r:.60})"
    missing = " (is a `return` missing?)" if value is None else ""
    is_class = isinstance(expected, type) and not get_args(expected)
    # As written in code, without modules: `TrainingJobRef | Skipped`.
    written = re.sub(r"(?:\w+\.)+|(?<=None)Type", "", expected.__name__ if is_class else str(expected))
    raise WrongReturnError(f"{_place(implementation)} returned {shown}, and `{written}` is expected{missing}")


@functools.cache
def _declared_return(method: Callable[..., Any]) -> Any:
    # Only the return type is resolved, because parameter types may be imported for type checkers only.
    # If the return type is too, it is looked up in the loaded modules, and else nothing is checked.
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
            return bool(value.ndim)  # Arrays of numpy or torch.
        (item,) = get_args(expected)
        is_list = isinstance(value, (list, tuple) if get_origin(expected) is list else Sequence)
        return is_list and not isinstance(value, str) and all(_fits(each, item) for each in value)
    if get_origin(expected) is tuple:
        items = get_args(expected)
        is_tuple = isinstance(value, tuple | list) and len(value) == len(items)
        return is_tuple and all(map(_fits, value, items))
    if get_origin(expected) is set:
        return isinstance(value, Set) and all(_fits(each, *get_args(expected)) for each in value)
    if get_origin(expected) is dict:
        is_dict, item = isinstance(value, dict), get_args(expected)[1]
        return is_dict and all(_fits(each, item) for each in value.values())
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if expected is float:
        try:
            number(value)
        except ValueError:
            return False
        return True
    if expected is bool and getattr(value, "ndim", None) == 0:
        value = value.item()  # Scalars of numpy or torch.
    return isinstance(value, get_origin(expected) or expected)


def _place(method: Callable[..., Any]) -> str:
    """Return the place of a method: `parts.py:12: Mine.submit`."""
    name = getattr(method, "__qualname__", repr(method)).rpartition("<locals>.")[2]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return name if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}"
