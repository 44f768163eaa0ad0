"""The end of a sentence about a wrong name: the nearest valid one, and the whole list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was most likely meant to be, or None when none is close."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def alternatives(name: str, choices: Iterable[str], *, otherwise: str = "none") -> str:
    """`; did you mean 'x'? Allowed: x, y`. `otherwise` is listed when there are no choices."""
    allowed = list(dict.fromkeys(choices))
    close = nearest(name, allowed)
    listing = f"Allowed: {', '.join(allowed) or otherwise}"
    return f"; did you mean '{close}'? {listing}" if close else f". {listing}"
