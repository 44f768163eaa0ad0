"""Standard output and error without secrets: of this process, whoever writes there."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from etude.core.secrets import masked


class MaskedStream:
    """A text stream in which secrets are masked; everything else is as in the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, its secrets masked."""
        self._stream.write(masked(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_streams() -> None:
    """Mask secrets in what this process writes to standard output and error from now on.

    Programs that it starts write there by themselves.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, MaskedStream(stream))
