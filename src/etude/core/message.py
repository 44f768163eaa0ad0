"""Chat messages in OpenAI's shape.

Inside the program a message is a plain dict in OpenAI's wire format (`Message`), because it is
passed on to engines and templates untouched. `OpenAIMessage` is its validated form, for values
that a person writes or reads.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

Message: TypeAlias = dict[str, Any]
"""`{"role": …, "content": …}` and, where they apply, `tool_calls`, `tool_call_id` and `name`."""

Tool: TypeAlias = dict[str, Any]
"""A tool in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


class OpenAIMessage(BaseModel):
    """A chat message as OpenAI's API defines it. Nothing that came with it is dropped."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: str
    content: str | None = None

    def to_wire(self) -> Message:
        """The message as the API takes it, without unset fields."""
        return self.model_dump(exclude_unset=True) | {"role": self.role, "content": self.content}
