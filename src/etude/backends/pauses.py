"""How long to wait between two looks at a job that runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

_FIRST = 0.25
_BACKOFF = 1.5


def pauses(usual: float, longest: float) -> Iterator[float]:
    """Seconds between looks at a job, without end.

    The first ones are short, for jobs that are; from `usual` on they grow slowly to `longest`.
    """
    pause = min(_FIRST, usual)
    while pause < usual:
        yield pause
        pause *= 2
    pause = usual
    while True:
        yield pause
        pause = max(usual, min(pause * _BACKOFF, longest))
