"""The connection of head and runner: JSON in frames, between two ends that have proved their identity.

Both ends ask each other, many questions at a time, and may cancel a question. A request's earlier calls are
only sent if the other end does not know them.
"""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from etude.core.call import Call, ChatRequest, Completion, Delta
from etude.core.errors import EtudeError, find_class
from etude.core.threads import end_tasks
from etude.engines.programs import Command, python_command
from etude.store.episodes import decode_call, encode_call, parent_name

_LENGTH_BYTES = 4
_MOST_BYTES = 2**31
_MOST_BYTES_BEFORE_PROOF = 4096
_PROOF_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
"""Seconds for the other end to receive the frames already sent."""


@dataclass(frozen=True)
class RunnerInvitation:
    """How a runner finds its head and proves its identity."""

    address: str
    """`host:port` of the head."""
    number: int
    key: str = field(repr=False)
    """In hexadecimal digits."""

    def command(self, host: str) -> Command:
        """Return the command of a runner."""
        return python_command("etude.processes.runner", json.dumps(astuple(self)))


class Disconnected(EtudeError):
    """The other end of a stream is gone."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A connection's reader and writer as one value."""

    reader: StreamReader
    writer: StreamWriter

    def send(self, frame: Any) -> None:
        """Send a frame. Raises TypeError or ValueError for a value that is not JSON; then nothing is sent."""
        data = json.dumps(frame, separators=(",", ":")).encode()
        if len(data) >= _MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long; the limit is {_MOST_BYTES}")
        self.writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self, most: int = _MOST_BYTES) -> Any:
        """Return the next frame. Raises Disconnected if there is none, or for anything else."""
        try:
            length = int.from_bytes(await self.reader.readexactly(_LENGTH_BYTES), "big")
            if length >= most:
                raise Disconnected(f"a message of {length} bytes is too long to be one of Etude's")
            return json.loads(await self.reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Disconnected("the connection was closed") from error
        except ValueError as error:
            raise Disconnected("the message received is not one of Etude's") from error

    async def close(self) -> None:
        """Close the connection. Frames sent before are still delivered, if the peer takes them in time."""
        self.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except OSError:
            return


async def shake_hands(stream: Stream, own: int | None, key_of: Callable[[int], bytes]) -> int:
    """Return the runner's number, once each end has proved that it knows the number's key.

    `own` is this runner's number, None at the head. Neither end shows the key: each answers a random
    challenge of the other. Raises Disconnected, and the errors of `key_of` for an unexpected number.
    """
    async with asyncio.timeout(_PROOF_SECONDS):
        ours = secrets.token_hex(32)
        stream.send([own, ours])
        match await stream.receive(_MOST_BYTES_BEFORE_PROOF):
            case [int(number), str(theirs)] if own is None:
                here, there = "head", "runner"
            case [None, str(theirs)] if own is not None:
                number, here, there = own, "runner", "head"
            case _:
                raise Disconnected("the message received is not one of Etude's")
        key = key_of(number)
        stream.send(_proof(key, here, ours, theirs))
        shown = str(await stream.receive(_MOST_BYTES_BEFORE_PROOF))
        if not hmac.compare_digest(shown.encode(errors="replace"), _proof(key, there, theirs, ours).encode()):
            raise Disconnected("the other end does not know the key")
        return number


def _proof(key: bytes, who: str, own: str, others: str) -> str:
    return hmac.new(key, f"{who} {own} {others}".encode(), hashlib.sha256).hexdigest()


Notify: TypeAlias = Callable[[Any], None]
"""Sends progress to the asking end before the answer is ready."""

Answer: TypeAlias = Callable[[str, dict[str, Any], Notify], Awaitable[Any]]
"""Answers a question, from its method, its parameters, and a function that reports progress."""


class RunnerLink:
    """One end of a connection. `serve` must run while it is used."""

    def __init__(self, stream: Stream, answer: Answer) -> None:
        self._stream = stream
        self._answer = answer
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[asyncio.Future[Any], Notify | None]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    async def ask(self, method: str, parameters: dict[str, Any], on_note: Notify | None = None) -> Any:
        """Ask the other end and return its answer. Cancelling this cancels the work there.

        Raises the other end's error, or RuntimeError if its class is unknown here. Raises Disconnected when
        the other end is gone, TypeError for parameters that are no JSON.
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
        """Answer questions until the other end is gone, then cancel unfinished answers."""
        try:
            while True:
                self._take(*await self._stream.receive())
        except Disconnected:
            return
        finally:
            await self._end()

    async def close(self) -> None:
        """Close the connection, which the other end notices."""
        self._is_closed = True
        await self._stream.close()

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "ask":
            self._answering[number] = asyncio.ensure_future(self._work(number, *rest))
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
                waiting.set_exception(_rebuild_error(rest[0]))

    async def _work(self, number: int, method: str, parameters: dict[str, Any]) -> None:
        def note(value: Any) -> None:
            if not self._is_closed:
                self._stream.send(["note", number, value])

        try:
            frame = ["answer", number, await self._answer(method, parameters, note)]
        except Exception as error:  # noqa: BLE001  the asking end raises it
            frame = ["error", number, _as_json(error)]
        finally:
            self._answering.pop(number, None)
        if not self._is_closed:
            try:
                self._stream.send(frame)
            except (TypeError, ValueError) as error:
                self._stream.send(["error", number, _as_json(error)])

    async def _end(self) -> None:
        self._is_closed = True
        for waiting, _ in self._asked.values():
            if not waiting.done():
                waiting.set_exception(Disconnected("the connection was closed"))
                waiting.exception()  # Retrieve the exception: the asking task may have been cancelled.
        await end_tasks(*self._answering.values())
        with contextlib.suppress(Disconnected):
            await self._stream.close()


def _as_json(error: Exception) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)]
    return {"kinds": names, "text": str(error), "param": getattr(error, "param", None)}


_BUILT_IN = {kind.__name__: kind for kind in (RuntimeError, ValueError, TypeError, OSError, TimeoutError)}


def _rebuild_error(data: dict[str, Any]) -> Exception:
    """Recreate the other end's error, in its class or the nearest known one."""
    names, text = data["kinds"], data["text"]
    if (built_in := _BUILT_IN.get(names[0])) is not None:
        return built_in(text)
    found = next(filter(None, (find_class(name, EtudeError) for name in names)), None)
    if found is None:
        return RuntimeError(f"{names[0]}: {text}")
    error = found.__new__(found)
    error.args = (text,)
    if data["param"] is not None or hasattr(found, "param"):
        error.param = data["param"]  # type: ignore[attr-defined]
    return error


CallCache: TypeAlias = dict[int, Call]
"""The calls of an episode that both ends know, by the runner's numbers."""


def encode_request(request: ChatRequest, model: str, number: int, known: CallCache) -> dict[str, Any]:
    """Encode a request as JSON, with the earlier calls that the other end does not know.

    Adds those calls to `known`, as the other end does.
    """
    numbers = {id(call.completion): each for each, call in known.items()}
    earlier: list[int] = []
    sent: list[Any] = []
    for call in request.earlier:
        if id(call.completion) not in numbers:
            call_number = -1 - len(known) - len(sent)  # Requested calls have numbers from 0.
            sent.append([call_number, encode_call(call, _last_call(earlier, known))])
            known[call_number] = call
            numbers[id(call.completion)] = call_number
        earlier.append(numbers[id(call.completion)])
    asked = Call(0, "", model, replace(request, earlier=(), on_delta=None))
    return {
        "number": number,
        "conversation": request.conversation,
        "call": encode_call(asked, _last_call(earlier, known)),
        "earlier": earlier,
        "sent": sent,
        "streams": request.on_delta is not None,
    }


def decode_request(data: Mapping[str, Any], known: CallCache) -> Call:
    """Decode the requested call, with its earlier calls. Changes `known` as the other end does."""
    conversation = data["conversation"]
    for each, encoded in data["sent"]:
        known[each] = decode_call(encoded, conversation, _parent(encoded, known))
    asked = decode_call(data["call"], conversation, _parent(data["call"], known))
    earlier = tuple(known[each] for each in data["earlier"])
    return replace(asked, request=replace(asked.request, earlier=earlier))


def encode_answer(call: Call, known: CallCache, earlier: list[int]) -> Any:
    """Encode the completion of a requested call as JSON."""
    return encode_call(call, _last_call(earlier, known))["completion"]


def decode_answer(asked: Mapping[str, Any], completion: Any, known: CallCache) -> Completion:
    """Decode the completion for the request that `encode_request` encoded as `asked`."""
    data = {**asked["call"], "completion": completion}
    call = decode_call(data, asked["conversation"], _parent(data, known))
    assert call.completion is not None
    known[asked["number"]] = call
    return call.completion


decode_delta = TypeAdapter(Delta).validate_python
"""Decode a piece of an answer from its fields."""


def _last_call(earlier: list[int], known: CallCache) -> tuple[str, Call] | None:
    return (str(earlier[-1]), known[earlier[-1]]) if earlier else None


def _parent(encoded: Any, known: CallCache) -> Call | None:
    name = parent_name(encoded)
    return None if name is None else known[int(name)]
