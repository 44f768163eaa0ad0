"""The client of a language-model server, as far as a group needs one."""

from __future__ import annotations

from typing import Protocol


class LanguageModelClient(Protocol):
    """Controls the engine of a language-model server. Jobs go through the OpenAI API beside it."""

    async def start_engine(self, model_name: str) -> None:
        """Have the server sample from a model, and wait until it does."""

    async def stop_engine(self) -> None:
        """Put the engine away, so that training has the device. An engine that is away is no error."""

    async def accepts_connections(self) -> bool:
        """Whether the server answers."""

    async def validate_server_version(self) -> None:
        """Raises an EtudeError when the server's version does not go with this package's."""
