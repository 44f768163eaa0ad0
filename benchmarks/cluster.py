"""Episodes on a Ray cluster of several raylets on this machine: how fast, and what survives kill -9.

Parts, by `--only`: `efficiency` (agents that wait, in 1, 2 and 4 runners), `overhead` (one runner against no
Ray), `journal` (calls that the run's process commits), `chaos` (training runs that are killed at random).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cluster_chaos import KILLS, QUICK_KILLS, measure_chaos
from cluster_rates import PARTS, measure_rates
from common import print_json, print_table, progress, silent

CHAOS = "chaos"

Part = Mapping[str, Any]


def as_json(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The object that `--json` prints: the figures that are compared first, and all of each part."""
    rates, commits, chaos = (parts.get(name) for name in ("efficiency", "journal", CHAOS))
    shares = {count: share["mean"] for count, share in rates["efficiency"].items()} if rates else None
    survived = ("kills", "unequal_ends", "paid_twice", "recovery_s_p50")
    return {
        "efficiency": shares,
        "journal_calls_per_s": commits["journal_calls_per_s"]["mean"] if commits else None,
        **{name: chaos[name] if chaos else None for name in survived},
        "parts": parts,
    }


def figures(part: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """The measured values of a part, with their names."""
    rows = []
    for name, value in part.items():
        if isinstance(value, Mapping) and "mean" in value:
            rows.append((prefix + name, value))
        elif isinstance(value, Mapping):
            rows += figures(value, f"{prefix}{name}, ")
    return rows


def print_rates(name: str, part: Mapping[str, Any]) -> None:
    """A table of one part."""
    rows = [
        (what.replace("_", " "), f"{value['mean']:g} [{value['low']}, {value['high']}]", str(value["n"]))
        for what, value in figures(part)
    ]
    settings = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in part["settings"].items())
    print_table(name, ("", "mean [95 %]", "n"), rows, [settings])


def print_chaos(part: Part) -> None:
    """A table of the kills, and what has become of the runs."""
    recoveries: Mapping[str, Any] = part["recovery_s"]
    rows = [
        (kind, str(count), *(str(recoveries.get(kind, {}).get(name, "")) for name in ("n", "p50", "max")))
        for kind, count in sorted(part["kills_by_kind"].items())
    ]
    notes = [
        *(
            f"{name}: {scene['kills']} kills in {scene['runs']} runs of {scene['steps_each']} steps, "
            f"{scene['unequal_ends']} of them not as the one that nobody disturbed"
            for name, scene in part["scenes"].items()
        ),
        f"{part['paid_twice']} of {part['paid_requests']} requests were for committed answers",
        f"{part['recovery_s_p50']} s from a kill to the next commit (median)",
        f"{len(part['hung'])} times nothing was committed for too long; "
        f"{len(part['head_failures'])} times the head ended by itself",
        f"--seed {part['settings']['seed']} makes the same choices again",
        *part["unequal_steps"],
    ]
    columns = ("killed", "times", "measured", "s to the next commit, median", "longest")
    print_table(CHAOS, columns, rows, notes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--only", choices=[*PARTS, CHAOS], action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="measure less, and less exactly")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--kills", type=int, help=f"how many ({KILLS}; with --quick {QUICK_KILLS})")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of what is killed when (0)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that the command line names, and print tables or JSON."""
    flags = parse(arguments)
    wanted, note = flags.only or [*PARTS, CHAOS], silent if flags.json else progress
    parts = measure_rates([name for name in PARTS if name in wanted], flags.quick, note)
    if CHAOS in wanted:
        kills = flags.kills or (QUICK_KILLS if flags.quick else KILLS)
        parts[CHAOS] = measure_chaos(kills, flags.seed, note)
    if flags.json:
        print_json(as_json(parts))
        return
    for name, part in parts.items():
        print_chaos(part) if name == CHAOS else print_rates(name, part)


if __name__ == "__main__":
    main()
