"""The tables of measured figures in the pages, made of benchmarks/results/*.json; `make docs` writes them.

A comment before a table says which values of a file are its rows, and what each cell shows of them:

    <!-- made of learner.json, settings.*: {model} | {cpu_ms.tree:.0f} | {peak_mb.tree:.0f} -->

In a path `*` stands for every part; the key of one is its `name`. Where there is a paragraph between comment
and table, its first line is made too: when, where and on how much it was measured. The head of a table stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("benchmarks/README.md", "docs/architecture.md")

_TABLE = re.compile(
    r"(?P<comment><!-- made of (?P<file>\S+), (?P<path>\S+):(?P<cells>[^>]*) -->\n)"
    r"(?:[^|\n].*\n(?P<more>(?:[^|\n].*\n)*\n))?(?P<head>\|.*\n\|.*\n)(?:\|.*\n)*"
)
_FIELD = re.compile(r"{([^:}]+):?([^}]*)}")


def render_figures(page: str) -> str:
    """The page with the rows of its tables as the files have them."""
    return _TABLE.sub(_render_table, (ROOT / page).read_text(encoding="utf-8"))


def _render_table(match: re.Match[str]) -> str:
    measured = json.loads((RESULTS / match["file"]).read_text(encoding="utf-8"))
    forms = " ".join(match["cells"].split()).split(" | ")
    rows = [[_fill(form, row) for form in forms] for row in _find(measured, match["path"])]
    for form, cells in zip(forms, zip(*rows, strict=True), strict=True):
        if not rows or not any(re.search(r"\w", cell) for cell in cells):
            raise ValueError(f"{match['file']} has nothing for {form} in {match['path']}")
    caption = _caption(match["file"], measured) + match["more"] if match["more"] else ""
    return match["comment"] + caption + match["head"] + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _caption(file: str, measured: dict[str, Any]) -> str:
    """When, where and on how much it was measured."""
    parts = [measured["machine"], *(f"{count} {of}" for of, count in measured["n"].items())]
    if measured["date"]:
        day = date.fromisoformat(measured["date"])
        parts = [f"{day.day} {day:%B %Y}", *parts]
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]} ([{file}](results/{file})).\n"


def _fill(form: str, row: Any) -> str:
    """A cell, with every field of its form filled in."""
    return _FIELD.sub(lambda field: ", ".join(_show(value, field[2]) for value in _find(row, field[1])), form)


def _find(value: Any, path: str, name: str = "") -> Iterator[Any]:
    """All values at a path; None for one that is not there."""
    part, _, rest = path.partition(".")
    if part == "*":
        for key, each in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            yield from _find(each, rest, key)
    elif part:
        inner = value[int(part)] if isinstance(value, list) else (value or {}).get(part)
        yield from _find(inner, rest, name)
    else:
        yield {"name": name} | value if isinstance(value, dict) else value


def _show(value: Any, form: str) -> str:
    """A number by its format, an estimate with its interval, and a dash for what was not measured."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, dict):
        mean, low, high = (_show(value.get(key), form) for key in ("mean", "low", "high"))
        return mean if low == "–" else f"{low} to {high}" if mean == "–" else f"{mean} [{low}, {high}]"
    return format(value, form).replace("%", " %")


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(render_figures(page), encoding="utf-8")
