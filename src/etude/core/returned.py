"""The returned values of an interface's methods, held to what it declares, whoever wrote them."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from etude.core.data_model import kind_of, number
from etude.core.errors import EtudeError, RequestError

_LISTS = (list, Sequence)
_WORDS: dict[Any, str] = {bool: "True or False", float: "a number", str: "text", types.NoneType: "None"}


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
        parameters = ", ".join(map(str, _parameters(declared)))
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
    missing = " (is a `return` missing?)" if value is None else ""
    raise WrongReturnError(
        f"{_place(implementation)} returned {_shown(value, expected)}, and {_words(expected)} is "
        f"expected{missing}"
    )


def _parameters(method: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(method).parameters.values():
        yield parameter.replace(annotation=inspect.Parameter.empty)


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
        return _is_number(value)
    if expected is bool and getattr(value, "ndim", None) == 0:
        value = value.item()  # Of numpy or torch.
    return isinstance(value, get_origin(expected) or expected)


def _is_number(value: Any) -> bool:
    try:
        number(value)
    except ValueError:
        return False
    return True


def _shown(value: Any, expected: Any) -> str:
    options = get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)
    lists = [each for each in options if get_origin(each) in _LISTS]
    if lists and isinstance(value, list | tuple):
        (item,) = get_args(lists[0])
        place, wrong = next((at, each) for at, each in enumerate(value) if not _fits(each, item))
        return f"{kind_of(value)} with {_shown(wrong, item)} at {place}"
    if inspect.isawaitable(value):
        return "what is to be waited for"
    return "None" if value is None else f"{kind_of(value)} ({value!r:.60})"


def _words(expected: Any) -> str:
    """The declared type as a person says it: `a TrainingJobRef or a Skipped`."""
    if expected in _WORDS:
        return _WORDS[expected]
    if get_origin(expected) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(expected)))
    if get_origin(expected) in _LISTS:
        (item,) = get_args(expected)
        kinds = get_args(item) if get_origin(item) in (Union, types.UnionType) else (item,)
        words = " or ".join("numbers" if each is float else _words(each).partition(" ")[2] for each in kinds)
        return f"a list of {words.replace('list', 'lists', 1) if get_origin(item) in _LISTS else words}"
    if get_origin(expected) is tuple:
        return f"a tuple of {' and '.join(map(_words, get_args(expected)))}"
    name = (get_origin(expected) or expected).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _place(method: Callable[..., Any]) -> str:
    """`parts.py:12: Mine.submit`."""
    name = getattr(method, "__qualname__", repr(method)).rpartition("<locals>.")[2]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return name if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}"
