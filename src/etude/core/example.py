"""An example: one row of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One dataset row, as workflows and evaluators see it."""

    id: str
    """Unique within its dataset, and stable: groups, resume and curriculum go by it. A number or a UUID
    becomes its text."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The inputs of the agent, by column name."""

    expected: Any = None
    """The expected answer, or None where there is none."""

    def __post_init__(self) -> None:
        """Raises ValueError for an id that names nothing."""
        object.__setattr__(self, "id", text_id(self.id))


def text_id(value: Any) -> str:
    """An id as text: a number, a UUID and the like by their text, so that 1 and "1" are one id.

    Raises ValueError for what names nothing, such as None, and for half of a surrogate pair.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"an id is text of whole characters, found {value!r:.80}") from None
        return str(value)
    if value is None or isinstance(value, bool | dict | list | tuple | set | bytes):
        raise ValueError(f"an id is text or a whole number, found {value!r:.80}")
    return str(value)
