"""Text that matplotlib can draw: names of runs and evaluators may be in any script."""

from __future__ import annotations

from functools import cache
from typing import Any

_DEFAULT = "DejaVu Sans"
"""Comes with matplotlib."""
_NO_FONT = "Last Resort"
"""In the name of a font that has a box for every character."""
_MISSING = "\u25a1"
"""Stands for a character that no font here has."""


def drawable(text: str) -> tuple[str, list[str]]:
    """The text, and the font families to draw it with.

    A character that no installed font has becomes a square.
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    missing = set(printable) - _letters_of_default()
    families = [_DEFAULT]
    if missing:
        family, letters = _best_font(frozenset(missing))
        families += [family] if letters else []
        missing -= letters
    return "".join(_MISSING if letter in missing else letter for letter in printable), families


def label(text: str) -> dict[str, Any]:
    """`text` as keywords of matplotlib's functions for text. A `$` in a name is no formula."""
    shown, families = drawable(text)
    # Other fonts are asked for in the one weight that all of them have.
    weight = {"fontweight": "normal"} if len(families) > 1 else {}
    return {"text": shown, "fontfamily": families, "parse_math": False, **weight}


@cache
def _letters_of_default() -> frozenset[str]:
    from matplotlib.font_manager import findfont

    return _letters(findfont(_DEFAULT))


@cache
def _best_font(missing: frozenset[str]) -> tuple[str, frozenset[str]]:
    """The installed font that has the most of the letters, and which of them."""
    from matplotlib.font_manager import fontManager

    best: tuple[str, frozenset[str]] = _DEFAULT, frozenset()
    for font in fontManager.ttflist:
        if font.style != "normal" or font.weight not in (400, "normal", "regular") or _NO_FONT in font.name:
            continue
        try:
            there = _letters(font.fname) & missing
        except (OSError, RuntimeError):
            continue  # A font that was removed, or that FreeType cannot read, is no font to draw with.
        if len(there) > len(best[1]):
            best = font.name, there
        if there == missing:
            break
    return best


@cache
def _letters(file: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(file).get_charmap()))
