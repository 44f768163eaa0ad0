"""How much one head can do, each part by itself, and what becomes of a run with a thousand nodes.

`--only` takes one of: head, journal, beats, memory, places, routes, real, simulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import scale_ceilings as ceilings
import scale_real as real
import scale_simulation as simulation
from common import print_json, print_table, progress, silent

from etude.core.stats import Estimate

Figures = dict[str, Any]
"""By name: estimates, and numbers that are counted. `us` are microseconds of CPU time."""


def measure_head(quick: bool) -> Figures:
    """Calls and episodes over the real link."""
    figures: Figures = {}
    for tokens in ceilings.SIZES:
        cost = ceilings.measure_head(tokens, *((64, 3) if quick else (400, 10)))
        figures |= {
            f"call of {tokens} tokens, us of the loop": cost.call_loop,
            f"call of {tokens} tokens, us of the journal's thread": cost.call_writer,
            f"calls of {tokens} tokens in a second": cost.calls_per_s,
            f"call of {tokens} tokens, bytes on the network": ceilings.frame_bytes(tokens),
        }
        if tokens == ceilings.SIZES[0]:
            figures["episode besides its calls, us of the loop"] = cost.episode_loop
            figures["episode besides its calls, us of the journal's thread"] = cost.episode_writer
    return figures


def measure_journal(quick: bool) -> Figures:
    """The journal alone."""
    figures: Figures = {}
    for tokens in ceilings.SIZES:
        for at_once in (1, 64, 1024):
            steps = (1024 if quick else 8192) * ceilings.SIZES[0] // tokens
            cost = ceilings.measure_journal(tokens, at_once, max(steps, at_once), 3 if quick else 10)
            name = f"calls of {tokens} tokens, {at_once} at once"
            figures |= {f"{name}: in a second": cost.steps_per_s, f"{name}: us each": cost.writer_us}
    return figures


def measure_beats(quick: bool) -> Figures:
    """Runners with nothing to do."""
    return {"idle runner, us in a second": ceilings.measure_beats(*((2, 3) if quick else (5, 10)))}


def measure_memory(quick: bool) -> Figures:
    """Episodes that wait for their first answer, and those that wait to be trained on."""
    figures: Figures = {
        "episode under way, kB of the head": ceilings.measure_memory(*((2000, 2) if quick else (10_000, 5)))
    }
    for calls, tokens in ((1, 1024), (5, 1024), (5, 8192)):
        name = f"finished episode of {calls} calls of {tokens} tokens, kB of the head"
        figures[name] = ceilings.measure_record(calls, tokens, *((10, 2) if quick else (20, 5)))
    return figures


def measure_places(quick: bool) -> Figures:
    """The pool's own choice of a runner."""
    return {
        f"to place an episode, {places} runners, {waiting} waiting: us": ceilings.measure_places(
            places, waiting, 3 if quick else 10
        )
        for places, waiting in ((10, 0), (10, 100), (1000, 0), (1000, 100), (1000, 1000))
    }


def measure_routes(quick: bool) -> Figures:
    """The choice of an address."""
    figures: Figures = {}
    for addresses in (10, 100, 1000):
        cost = ceilings.measure_routes(addresses, *((300, 3) if quick else (2000, 10)))
        figures[f"new conversation, {addresses} addresses: us"] = cost["new"]
        figures[f"its next call, {addresses} addresses: us"] = cost["next"]
    return figures


def measure_real(quick: bool) -> Figures:
    """One runner to four, here and simulated; of use only where nothing else runs on the machine."""
    costs = simulation.measured_costs(quick)
    figures: Figures = {}
    for runners, each in ((1, 16), (2, 16), (4, 16), (4, 128)):
        point = real.compare(runners, costs, *((5.0, 3) if quick else (20.0, 10)), each)
        name = f"{runners} runners, {each} episodes each"
        figures |= {
            f"{name}: calls in a second": point.calls_per_s,
            f"{name}: simulated": point.simulated_calls_per_s,
            f"{name}: error of that, %": 100 * point.error,
            f"{name}: us of the loop for a call": point.head_us,
            f"{name}: us of the head, simulated": point.simulated_head_us,
        }
    return figures


def measure_simulation(quick: bool) -> Figures:
    """Ten nodes to a thousand, and nodes that are lost."""
    costs = simulation.measured_costs(quick)
    figures: Figures = {f"{name}, s": value for name, value in asdict(costs).items()}
    for setting in simulation.settings(quick):
        outcome = simulation.simulate(setting, costs)
        lost = f", {setting.lost_per_minute:.0%} lost a minute" if setting.lost_per_minute else ""
        name = f"{setting.nodes} nodes, {setting.at_once} at once{lost}"
        figures |= {
            f"{name}: calls in a second": outcome.calls_per_s,
            f"{name}: head busy, %": 100 * outcome.head,
            f"{name}: journal busy, %": 100 * outcome.journal,
            f"{name}: network busy, %": 100 * outcome.network,
            f"{name}: s to commit a call, median": outcome.waits[0],
            f"{name}: s to commit a call, 99 %": outcome.waits[1],
            f"{name}: episodes begun again": outcome.played_again,
            f"{name}: calls committed again": outcome.calls_again,
            f"{name}: virtual s": outcome.seconds,
            f"{name}: CPU s of the simulation": outcome.real_seconds,
            f"{name}: MB of the simulation, at most so far": outcome.peak_mb,
        }
    return {name: value for name, value in figures.items() if value is not None}


PARTS: dict[str, Callable[[bool], Figures]] = {
    "head": measure_head,
    "journal": measure_journal,
    "beats": measure_beats,
    "memory": measure_memory,
    "places": measure_places,
    "routes": measure_routes,
    "real": measure_real,
    "simulation": measure_simulation,
}


def as_json(parts: dict[str, Figures]) -> dict[str, Any]:
    """The object that `--json` prints."""

    def shown(value: Any) -> Any:
        if isinstance(value, Estimate):
            return {"mean": value.mean, "low": value.low, "high": value.high, "n": value.n}
        return value

    return {part: {name: shown(value) for name, value in each.items()} for part, each in parts.items()}


def print_parts(parts: dict[str, Figures]) -> None:
    """The table."""
    rows = [
        (f"{part}: {name}", _shown(value)) for part, each in parts.items() for name, value in each.items()
    ]
    print_table("what bounds scale", ("", "mean [95 %] n"), rows, ["us: microseconds of CPU time"])


def _shown(value: Any) -> str:
    if not isinstance(value, Estimate):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f"{value.mean:,.4g} [{value.low:,.4g}, {value.high:,.4g}] n={value.n}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure less, and less exactly")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    flags = parser.parse_args(arguments)
    parts: dict[str, Figures] = {}
    for name, measure in PARTS.items():
        if flags.only in (None, name):
            (silent if flags.json else progress)(name)
            parts[name] = measure(flags.quick)
    if flags.json:
        print_json(as_json(parts))
    else:
        print_parts(parts)


if __name__ == "__main__":
    main()
