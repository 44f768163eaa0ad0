"""Context variables that have a value for as long as a block goes on."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Within(Generic[T]):
    """`with Within(variable, value) as value:` sets a context variable, in tasks that the block starts too.

    Several are entered with every call of a model: `contextlib.contextmanager` takes three times as long.
    """

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T] | ContextVar[T | None], value: T) -> None:
        self._variable: ContextVar[Any] = variable
        self._value = value

    def __enter__(self) -> T:
        self._token: Token[Any] = self._variable.set(self._value)
        return self._value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._variable.reset(self._token)
