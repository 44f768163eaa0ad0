"""One self-contained file of a run: its overview, and sampled episodes with their tokens."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.core.keys import generator
from etude.report.token_texts import TokenTexts
from etude.store.episodes import epoch_of
from etude.store.files import write_atomically
from etude.store.outline import EpisodeOutline, outlines, phases_in
from etude.store.run_folder import RunFolder
from etude.store.sequences import trained_sequences
from etude.view.episode import episode_context
from etude.view.library import Library
from etude.view.pages import STATIC, render
from etude.view.runs import overview
from etude.view.tokens import CHUNK, chunk_of, sequence_context

_STYLES = ("vendor/uPlot.min.css", "view.css")
_SCRIPTS = ("theme.js", "vendor/uPlot.min.js", "charts.js", "tokens.js", "keys.js")
_PHASES = 4
"""Phases that episodes are taken from: the first and the last ones."""
_MOST_TOKENS = 4000
"""Of a sequence; the rest is left out."""


def export_run(path: Path, file: Path, count: int = 12) -> int:
    """Write the run in a folder as a web page that needs nothing else; how many episodes it has.

    These are drawn from the first and the last phases, the same each time. Raises RequestError for a run
    without episodes, StoreError where the file cannot be written.
    """
    library = Library(path.parent)
    with RunFolder.read(path) as run:
        chosen = _chosen(run, library.reward(path), count)
        sections = [_section(run, library, path, each) for each in chosen]
    styles = "\n".join(_text(name) for name in _STYLES)
    scripts = [_text(name) for name in _SCRIPTS]
    context = overview(library, path)
    # No link of the file leads to a server: addresses are places in it.
    text = render(
        "export.html",
        styles=styles,
        scripts=scripts,
        policy=_policy([styles], scripts),
        sections=sections,
        chunk=CHUNK,
        request=None,
        **context,
    )
    write_atomically(file.absolute(), text, exact=True)
    return len(sections)


def _chosen(run: RunFolder, reward: str | None, count: int) -> list[EpisodeOutline]:
    """Episodes of the first and the last phases, of each as many."""
    phases = phases_in(run.journal)
    if not phases:
        raise RequestError(f"run {run.name} has no episodes yet, and so nothing to send")
    ends = list(dict.fromkeys([*phases[: _PHASES // 2], *phases[-(_PHASES // 2) :]]))
    episodes: list[EpisodeOutline] = []
    for number, phase in enumerate(ends):
        share = (count + len(ends) - 1 - number) // len(ends)
        own = [*outlines(run.journal, f"{phase}/", reward)]
        own = generator(0, "export", phase).sample(own, min(share, len(own)))
        episodes += sorted(own, key=lambda each: each.id)
    return episodes


def _section(run: RunFolder, library: Library, path: Path, chosen: EpisodeOutline) -> dict[str, Any]:
    """An episode, and the first of its sequences."""
    context = episode_context(run, chosen.id, library.rewards(path))
    context["more"] = 0
    sequences = trained_sequences(path, run.journal, context["record"], chosen.phase)
    if sequences:
        texts = TokenTexts(path, library.settings(path), sequences[0].model)
        length = min(len(sequences[0].ids), _MOST_TOKENS)
        starts = range(0, length, CHUNK)
        context |= sequence_context(sequences[0], texts)
        context["inline"] = [
            chunk_of(sequences[0], texts, start, min(start + CHUNK, length)) for start in starts
        ]
        context |= {"length": length, "is_training": epoch_of(chosen.phase) is not None}
    return {**context, "outline": chosen, "has_tokens": bool(sequences)}


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Nothing may run in the file but what it is made of, and nothing be fetched."""
    of = [" ".join(f"'sha256-{_digest(text)}'" for text in texts) for texts in (scripts, styles)]
    return f"default-src 'none'; script-src {of[0]}; style-src {of[1]}; img-src data:; base-uri 'none'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
