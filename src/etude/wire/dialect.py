"""A dialect: one API that agents speak, translated to and from the calls that are recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.core.call import Completion
from etude.core.errors import RequestError
from etude.core.message import Message, Tool

Event = tuple[str | None, Any]
"""A server-sent event: its name, where the dialect names events, and its data; a text stays as it is."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A request for a completion, taken apart."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that the request gave, under the names of `Sampling`."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk that holds the usage."""
    logprobs: bool = False
    return_token_ids: bool = False
    function: str | None = None
    """The function of the agent that asks, when the request's headers name one."""


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """A completion that was recorded, as an API presents it."""

    id: str
    model: str
    completion: Completion


class Dialect(Protocol):
    """Reads requests and writes answers. One instance serves one episode, and may remember what was said."""

    def parse(self, body: Any) -> ChatBody:
        """Read the JSON of a request.

        Raises RequestError for what is missing or malformed, and for parameters that would have to be
        ignored: a request is honoured as it stands or refused.
        """

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The answer to `body`, which was read as `asked`; `created` in Unix seconds."""

    def events(
        self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int
    ) -> Iterator[Event]:
        """The events of a stream that says the same as `reply`."""

    def error(self, message: str, *, kind: str, code: str | None) -> dict[str, Any]:
        """The error object; `kind` is OpenAI's `type` of it."""


def require_object(body: Any) -> dict[str, Any]:
    """The body. Raises RequestError unless it is an object."""
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    return body


def require_honoured(
    body: Mapping[str, Any], free: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise RequestError for a parameter that would have to be ignored.

    Those in `free` may have any value, those in `neutral` only the ones at which they change nothing.
    """
    for name, value in body.items():
        if name in free or value is None:
            continue
        if name not in neutral:
            raise RequestError(f"parameter '{name}' is not supported for a recorded model; leave it out")
        if value not in neutral[name]:
            raise RequestError(
                f"parameter '{name}' can only be {neutral[name][0]!r} for a recorded model, found {value!r}"
            )


def text_in(value: Any, where: str, kinds: Collection[str]) -> str:
    """The text of a content: a string, or parts of the given types. Raises RequestError for other parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a text or a list of parts, found {value!r:.80}")
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{place}] must be text ({', '.join(kinds)}), found {part!r:.80}")
        texts.append(part["text"])
    return "".join(texts)


def required(value: Mapping[str, Any], name: str, where: str) -> str:
    """A text among the fields of an object. Raises RequestError where it is missing."""
    found = value.get(name)
    if not isinstance(found, str):
        raise RequestError(f"{where} needs a text '{name}', found {found!r:.80}")
    return found


def objects_in(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; none for None. Raises RequestError for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RequestError(f"{where} must be a list of objects, found {value!r:.80}")
    return value
