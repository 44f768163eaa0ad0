"""Which progress display suits where the output goes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from etude.report.lines import JsonProgress, LineProgress

if TYPE_CHECKING:
    from etude.report.live import LiveProgress


def progress_for(
    *, json: bool = False, stream: TextIO | None = None
) -> LiveProgress | LineProgress | JsonProgress:
    """A progress display, to be used as a context manager.

    JSON lines when asked for, a live panel on a terminal, plain lines with the time into anything else.
    `stream` is standard output by default.
    """
    stream = sys.stdout if stream is None else stream
    if json:
        return JsonProgress(stream)
    if not stream.isatty():
        return LineProgress(stream, stamped=True)
    # Imported here: rich is not needed for the other two.
    from rich.console import Console

    from etude.report.live import LiveProgress

    return LiveProgress(Console(file=stream))
