"""Faults of every kind, and what becomes of the runs that they happen to.

Parts, by `--only`: `operations` (SIGKILL at every file operation of a short run), `random` (at random
moments), `flips` (single bytes of a stopped run's journal and weights), `agents` (agents and evaluators that
raise, return what nobody expects, or harm their process; once without and once with `isolation: process`),
`soak` (the memory of a long run). Exits with 1 where anything is not as it has to be.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import chaos_run  # the first: it has the tests' parts found
from chaos_agents import misbehave
from chaos_flips import flip_bytes
from chaos_kills import kill_at_every_operation, kill_at_random
from chaos_soak import soak
from common import print_json, print_table, progress, silent

Note = Callable[[str], None]

PARTS = ("operations", "random", "flips", "agents", "soak")

_RANDOM_KILLS = (500, 10)
_FLIPS = (200, 10)
_EPISODES = (100_000, 5_000)
_EVERY = (1, 20)
"""File operations from one kill to the next. As all of these in full, and with `--quick`."""


def measure(parts: Sequence[str], seed: int, quick: bool, note: Note) -> dict[str, Any]:
    """The figures of the parts, by name."""
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if {"operations", "random", "flips"} & {*parts}:
            run = chaos_run.ShortRun(folder / "short")
        if "operations" in parts:
            results["operations"] = kill_at_every_operation(run, folder, _EVERY[quick], note).as_json()
        if "random" in parts:
            choice = random.Random(f"random {seed}")
            results["random"] = kill_at_random(run, _RANDOM_KILLS[quick], choice, note).as_json()
        if "flips" in parts:
            choice = random.Random(f"flips {seed}")
            results["flips"] = flip_bytes(run, folder, _FLIPS[quick], choice, note).as_json()
        if "agents" in parts:
            results["agents"] = {each: misbehave(folder, each, note) for each in ("none", "process")}
        if "soak" in parts:
            results["soak"] = soak(folder, _EPISODES[quick], note)
    return results


def as_json(results: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `--json` prints: the figures that are compared first, None where no part has them."""
    killed = [results[name] for name in ("operations", "random") if name in results]
    harmed = [*killed, *(results[name] for name in ("flips",) if name in results)]
    agents = results.get("agents", {})
    return {
        "kills": sum(each["harmed"] for each in killed) if killed else None,
        "faults": sum(each["faults"] for each in agents.values()) if agents else None,
        "unequal_ends": sum(each["unequal_ends"] for each in killed) if killed else None,
        "failures": sum(each["failures"] for each in harmed) if harmed else None,
        "silent": results["flips"]["unequal_ends"] if "flips" in results else None,
        "faults_that_spread": sum(len(each["problems"]) for each in agents.values()) if agents else None,
        "memory_growth": results["soak"]["last_tenth_over_first"] - 1 if "soak" in results else None,
        "parts": dict(results),
    }


def is_whole(figures: Mapping[str, Any]) -> bool:
    """Whether everything is as it has to be."""
    zeros = ("unequal_ends", "failures", "silent", "faults_that_spread")
    return not any(figures[name] for name in zeros) and (figures["memory_growth"] or 0.0) <= 0.05


def show(results: Mapping[str, Any]) -> None:
    """A table, and what is not as it has to be."""
    rows, notes = [], []
    for name in ("operations", "random", "flips"):
        if name in results:
            part = results[name]
            shown = [str(part[each]) for each in ("harmed", "refused", "unequal_ends", "failures")]
            rows.append([name, *shown])
            notes += part["examples"]
    for isolation, part in results.get("agents", {}).items():
        rows.append(
            [f"agents, isolation: {isolation}", str(part["faults"]), "", "", str(len(part["problems"]))]
        )
        notes += part["problems"]
    if "soak" in results:
        part = results["soak"]
        notes.append(f"memory by tenths of {part['episodes']} episodes, MB: {part['memory_mb_by_tenth']}")
    print_table("chaos", ("", "harmed", "refused", "unequal", "failed"), rows, notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the parts that the command line names; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places (0)")
    flags = parser.parse_args(arguments)
    results = measure(flags.only or PARTS, flags.seed, flags.quick, silent if flags.json else progress)
    figures = as_json(results)
    print_json(figures) if flags.json else show(results)
    return 0 if is_whole(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
