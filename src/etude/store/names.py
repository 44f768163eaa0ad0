"""Names of runs: readable, sortable by day, and unique in their folder."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from etude.core.errors import RequestError

_MOODS = """
    agile brisk bright calm candid clear deft eager fleet fluent gentle golden keen light lively lucid
    mellow nimble noble patient quick quiet rapid serene silver simple spry steady subtle swift tender vivid
"""
_FORMS = """
    adagio allegro anthem arabesque aria ballad bolero cadence canon cantata chorale coda fugue gavotte
    gigue intermezzo largo madrigal mazurka minuet nocturne overture prelude rondo scherzo serenade sonata
    suite tango tarantella toccata waltz
"""


def new_run_name(root: Path) -> str:
    """A name that no folder in `root` has: the day, and two words."""
    day = datetime.date.today().isoformat()
    name = f"{day}-{secrets.choice(_MOODS.split())}-{secrets.choice(_FORMS.split())}"
    candidate, count = name, 1
    while (root / candidate).exists():
        count += 1
        candidate = f"{name}-{count}"
    return candidate


def check_run_name(name: str) -> str:
    """`name` itself. Raises RequestError when it would not make one folder."""
    is_text = bool(name.strip()) and name.isprintable()
    if not is_text or name.startswith(".") or any(character in name for character in "/\\:"):
        raise RequestError(f"{name!r} cannot name a run: use letters, digits, '-', '_' and '.'")
    return name
