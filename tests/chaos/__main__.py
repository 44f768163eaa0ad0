"""Faults of every kind, and what becomes of the runs that they happen to: `python -m tests.chaos`.

`--only PART` plays one of the parts, which are listed below. Exits with 1 where anything is not as it has
to be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.agents import misbehave
from tests.chaos.cluster import kill_on_cluster
from tests.chaos.kills import flip_bytes, kill_at_every_operation, kill_at_random
from tests.chaos.remote import remote
from tests.chaos.scene import FIGURES, Figures, Scene, is_whole, summed

PARTS: Mapping[str, Callable[[Scene], Figures]] = {
    "operations": kill_at_every_operation,
    "random": kill_at_random,
    "flips": flip_bytes,
    "agents": misbehave,
    "remote": remote,
    "cluster": kill_on_cluster,
}


def _progress(what: str) -> None:
    print(f"playing: {what}", file=sys.stderr, flush=True)


def _silent(what: str) -> None:
    """Say nothing, for `--json`."""


def measure(parts: Sequence[str], scene: Scene) -> dict[str, Figures]:
    """The figures of the parts, by name, with the minutes that each took."""
    results: dict[str, Figures] = {}
    for name in parts:
        begun = time.monotonic()
        results[name] = PARTS[name](scene)
        results[name]["minutes"] = round((time.monotonic() - begun) / 60, 1)
    return results


def show(results: Mapping[str, Figures], totals: Figures) -> None:
    """The figures of each part, and what is not as it has to be."""
    for part, figures in {**results, "all": totals}.items():
        known = {name: figures[name] for name in FIGURES if figures.get(name) is not None}
        print(f"{part:12} {', '.join(f'{name} {value:g}' for name, value in known.items())}")
    for name, figures in results.items():
        for problem in figures.get("problems", ()):
            print(f"{name}: {problem}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the parts that the command line names; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places (0)")
    flags = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        scene = Scene(Path(name), flags.seed, flags.quick, _silent if flags.json else _progress)
        results = measure(flags.only or [*PARTS], scene)
    totals = summed(results)
    if flags.json:
        print(json.dumps(totals | {"parts": results}, indent=2))
    else:
        show(results, totals)
    return 0 if is_whole(totals) else 1


if __name__ == "__main__":
    sys.exit(main())
