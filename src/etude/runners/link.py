"""A link: both ends of a stream ask each other, many questions at a time, and may take a question back."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from etude.core.errors import EtudeError
from etude.runners.frames import Disconnected, Stream

Note: TypeAlias = Callable[[Any], None]
"""Tells whoever asked something while the answer is still being made."""

Answer: TypeAlias = Callable[[str, dict[str, Any], Note], Awaitable[Any]]
"""Answers a question: its method, its parameters, and how to tell of progress."""


class Link:
    """One end of a connection. `serve` has to run while it is used."""

    def __init__(self, stream: Stream, answer: Answer) -> None:
        self._stream = stream
        self._answer = answer
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[asyncio.Future[Any], Note | None]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    async def ask(self, method: str, parameters: dict[str, Any], on_note: Note | None = None) -> Any:
        """The other end's answer. Cancelling this stops its work on it.

        Raises what it raised there (an error of a class that is not known here as a RuntimeError),
        Disconnected when it is gone, TypeError for parameters that are no JSON.
        """
        if self._is_closed:
            raise Disconnected("the connection was closed")
        number = next(self._numbers)
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stream.send(["ask", number, method, parameters])
        self._asked[number] = waiting, on_note
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._is_closed:
                self._stream.send(["cancel", number])
            raise
        finally:
            self._asked.pop(number, None)

    async def serve(self) -> None:
        """Answer questions until the other end is gone; work on answers that nobody gets is then stopped."""
        try:
            while True:
                self._take(*await self._stream.receive())
        except Disconnected:
            return
        finally:
            await self._end()

    async def close(self) -> None:
        """Close the connection; the other end sees that."""
        self._is_closed = True
        await self._stream.close()

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "ask":
            task = asyncio.ensure_future(self._work(number, *rest))
            self._answering[number] = task
        elif kind == "cancel":
            if number in self._answering:
                self._answering[number].cancel()
        elif number in self._asked:
            waiting, on_note = self._asked[number]
            if kind == "note" and on_note is not None:
                on_note(rest[0])
            elif kind == "answer" and not waiting.done():
                waiting.set_result(rest[0])
            elif kind == "error" and not waiting.done():
                waiting.set_exception(_error_of(rest[0]))

    async def _work(self, number: int, method: str, parameters: dict[str, Any]) -> None:
        try:
            frame = ["answer", number, await self._answer(method, parameters, self._note(number))]
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the question was asked
            frame = ["error", number, _as_json(error)]
        finally:
            self._answering.pop(number, None)
        if not self._is_closed:
            try:
                self._stream.send(frame)
            except (TypeError, ValueError) as error:
                self._stream.send(["error", number, _as_json(error)])

    def _note(self, number: int) -> Note:
        return lambda value: None if self._is_closed else self._stream.send(["note", number, value])

    async def _end(self) -> None:
        self._is_closed = True
        for waiting, _ in self._asked.values():
            if not waiting.done():
                waiting.set_exception(Disconnected("the connection was closed"))
                waiting.exception()  # Seen: whoever asked may have been cancelled.
        answering = list(self._answering.values())
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        with contextlib.suppress(Disconnected):
            await self._stream.close()


def _as_json(error: Exception) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)]
    return {"kinds": names, "text": str(error), "param": getattr(error, "param", None)}


def _error_of(data: dict[str, Any]) -> Exception:
    """The error that was raised at the other end, of its class or the nearest that is known here."""
    known = {kind.__name__: kind for kind in _with_subclasses(EtudeError)}
    name = next((name for name in data["kinds"] if name in known), None)
    if name is not None:
        error = known[name].__new__(known[name])
        error.args = (data["text"],)
        if data["param"] is not None or hasattr(known[name], "param"):
            error.param = data["param"]  # type: ignore[attr-defined]
        return error
    kind = getattr(builtins, data["kinds"][0], None)
    if data["kinds"][0] in ("RuntimeError", "ValueError", "TypeError", "OSError", "TimeoutError") and kind:
        return kind(data["text"])  # type: ignore[no-any-return]
    return RuntimeError(f"{data['kinds'][0]}: {data['text']}")


def _with_subclasses(kind: type[EtudeError]) -> Iterator[type[EtudeError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)
