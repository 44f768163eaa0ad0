"""The cost of a form: sampling 64 answers at a time with and without a JSON schema, in pairs that take turns.

`python benchmarks/engine.py --schema` measures it. CPU time is that of the process, all of its threads: those
of llguidance and Etude's own.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from common import print_table

from etude.core.call import Constraint
from etude.core.stats import Estimate, estimate
from etude.inference.embedded import EmbeddedEngine
from etude.models.policy import Policy

AT_ONCE = 64
GOAL = 15.0
"""Percent more CPU time a token at most."""
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["person", "place", "thing"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
"""Of answers that do not end by themselves."""

FORM = Constraint("json_schema", json.dumps(SCHEMA))

Cost = Callable[[Sequence[list[int]], int, int], tuple[float, float]]
"""CPU and wall seconds of continuing prompts by so many tokens, so many at a time."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Runs of one model without and with the schema: microseconds a token."""

    model: str
    cpu: tuple[tuple[float, float], ...]
    wall: tuple[tuple[float, float], ...]


def percent_more(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """How many percent more the second of each pair takes."""
    return estimate([100 * (formed / plain - 1) for plain, formed in pairs])


def measure_pairs(
    name: str,
    policy: Policy,
    costs_of: Callable[[EmbeddedEngine], tuple[Cost, Cost]],
    *,
    pairs: int,
    tokens: int,
) -> Pairs:
    """Pairs of runs on the same prompts; which goes first changes from pair to pair.

    `costs_of` makes both ways to measure, without and with the schema, from an engine.
    """
    engine, choose = EmbeddedEngine(policy), random.Random(0)
    ways = costs_of(engine)
    cpu, wall = list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(pairs + 1):
        prompts = [[choose.randrange(7, 400) for _ in range(32)] for _ in range(AT_ONCE)]
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {way: ways[way](prompts, tokens, AT_ONCE) for way in order}
        if number:  # The first is to warm up.
            each = 1e6 / (AT_ONCE * tokens)
            cpu.append((seconds[0][0] * each, seconds[1][0] * each))
            wall.append((seconds[0][1] * each, seconds[1][1] * each))
    asyncio.run(engine.close())
    return Pairs(name, tuple(cpu), tuple(wall))


def schema_json(measured: Sequence[Pairs]) -> dict[str, Any]:
    """The object that `--schema --json` prints."""
    return {
        "at_once": AT_ONCE,
        "goal_percent": GOAL,
        "models": {
            each.model: {
                "pairs": len(each.cpu),
                **{f"percent_more_{kind}": _numbers(percent_more(pairs)) for kind, pairs in _kinds(each)},
                **{
                    f"{kind}_us_per_token": dict(zip(("plain", "schema"), _medians(pairs), strict=True))
                    for kind, pairs in _kinds(each)
                },
            }
            for each in measured
        },
        "versions": versions(),
    }


def print_schema(measured: Sequence[Pairs]) -> None:
    """The table."""
    rows = []
    for each in measured:
        more = [percent_more(pairs) for _, pairs in _kinds(each)]
        figures = [f"{value:.1f}" for value in _medians(each.cpu)]
        shown = [f"{mean.mean:+.1f} % [{mean.low:.1f}, {mean.high:.1f}]" for mean in more]
        rows.append([each.model, str(len(each.cpu)), *figures, *shown])
    print_table(
        f"Sampling {AT_ONCE} at a time, with and without a JSON schema",
        ["model", "pairs", "CPU µs a token", "with schema", "more CPU", "more wall time"],
        rows,
        [
            f"mean of the pairs with its 95 % interval; the goal is at most {GOAL:g} % more CPU",
            ", ".join(f"{name} {number}" for name, number in versions().items()),
        ],
    )


def versions() -> dict[str, str]:
    """Of what was measured."""
    return {name: version(name) for name in ("torch", "transformers", "llguidance")}


def _kinds(each: Pairs) -> tuple[tuple[str, Sequence[tuple[float, float]]], ...]:
    return ("cpu", each.cpu), ("wall", each.wall)


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    plain, formed = (round(statistics.median(values), 2) for values in zip(*pairs, strict=True))
    return plain, formed


def _numbers(more: Estimate) -> dict[str, float]:
    return {"mean": round(more.mean, 2), "low": round(more.low, 2), "high": round(more.high, 2)}
