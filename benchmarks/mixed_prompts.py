"""Prompts of many lengths that arrive while others speak: tokens in a CPU second, and for how long rows wait.

Llamas of 0.13M and 30M parameters with random weights, in float32 with one thread. The clock of arrivals is
CPU time, so that a busy machine changes nothing. There is no peer: what is to be seen is that rows that speak
go on while the prompts of others are read.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common import parse_arguments, print_json, print_table
from engine import LARGE, SMALL, model, random_prompts

from etude.core.call import Sampling
from etude.inference.decoder import Decoder, make_decoder
from etude.inference.sampler import Row, uniforms


@dataclass(frozen=True)
class Load:
    """Requests, and when they come."""

    name: str
    requests: int
    prompt: tuple[int, int]
    """Shortest and longest; the logarithm is uniform."""
    answer: int
    apart: float
    """CPU seconds between two arrivals in the mean; 0 for all at once."""


LOADS = {
    LARGE: (
        Load("40 to 2000 tokens, one by one", 24, (40, 2000), 64, 0.6),
        Load("40 to 2000 tokens, at once", 24, (40, 2000), 64, 0.0),
        Load("32 tokens, at once", 32, (32, 32), 32, 0.0),
    ),
    SMALL: (
        Load("20 to 400 tokens, one by one", 200, (20, 400), 64, 0.004),
        Load("20 to 400 tokens, at once", 200, (20, 400), 64, 0.0),
        Load("32 tokens, at once", 64, (32, 32), 64, 0.0),
    ),
}


@dataclass(slots=True)
class Found:
    """Of several runs of one load."""

    rates: list[float] = field(default_factory=list)
    """Tokens sampled in a CPU second."""
    stalls: list[float] = field(default_factory=list)
    """The longest time between two tokens of a row, in CPU milliseconds."""
    firsts: list[float] = field(default_factory=list)
    """The median time from arrival to the first token, in CPU milliseconds."""

    def as_json(self) -> dict[str, Any]:
        """Medians, and their number."""
        return {
            "n": len(self.rates),
            "tokens_per_cpu_s": round(statistics.median(self.rates)),
            "longest_stall_ms": round(statistics.median(self.stalls), 1),
            "first_token_ms": round(statistics.median(self.firsts), 1),
        }


def run(decoder: Decoder, load: Load, seed: int, found: Found) -> None:
    """Sample all answers of one load."""
    choose = random.Random(seed)
    low, high = (math.log(length) for length in load.prompt)
    lengths = [round(math.exp(choose.uniform(low, high))) for _ in range(load.requests)]
    prompts = [random_prompts(choose, 1, length)[0] for length in lengths]
    rows = [Row(f"{seed}-{n}", ids, Sampling(), uniforms(n)) for n, ids in enumerate(prompts)]
    arrivals, at = dict[Row, float](), 0.0
    for row in rows:
        arrivals[row], at = at, at + (choose.expovariate(1 / load.apart) if load.apart else 0.0)
    waiting, active = rows[::-1], list[Row]()
    last, firsts, longest, idle = dict[Row, float](), list[float](), 0.0, 0.0
    start = time.process_time()
    while waiting or active:
        now = time.process_time() - start + idle
        if not active and arrivals[waiting[-1]] > now:
            idle += arrivals[waiting[-1]] - now
            now = arrivals[waiting[-1]]
        while waiting and arrivals[waiting[-1]] <= now:
            active.append(waiting.pop())
        grown = decoder.step(active)
        now = time.process_time() - start + idle
        for row in grown:
            if row in last:
                longest = max(longest, now - last[row])
            else:
                firsts.append(now - arrivals[row])
            last[row] = now
            if len(row.logprobs) == load.answer:
                decoder.release(row)
        active = [row for row in active if len(row.logprobs) < load.answer]
    seconds = time.process_time() - start
    found.rates.append(load.requests * load.answer / seconds)
    found.stalls.append(longest * 1000)
    found.firsts.append(statistics.median(firsts) * 1000)


def measure(quick: bool, repeats: int = 5) -> dict[str, dict[str, Any]]:
    """Each load several times, after a first run that is not counted."""
    torch.set_num_threads(1)
    results = dict[str, dict[str, Any]]()
    for name in [SMALL] if quick else LOADS:
        policy = model(name, context=4096)
        for load in LOADS[name]:
            found = Found()
            for number in range(repeats + 1):
                run(
                    make_decoder(policy, slots=64, deterministic=False),
                    load,
                    number,
                    found if number else Found(),
                )
            results[f"{name}, {load.name}"] = found.as_json()
    return results


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "")
    results = measure(arguments.quick)
    if arguments.json:
        print_json(results)
        return
    keys = ["tokens_per_cpu_s", "longest_stall_ms", "first_token_ms"]
    rows = [[name, *(f"{found[key]:g}" for key in keys)] for name, found in results.items()]
    print_table(
        "Prompts that arrive while others speak",
        ["", "tokens/CPU s", "longest stall, CPU ms", "first token, CPU ms"],
        rows,
        ["medians of 5 runs"],
    )


if __name__ == "__main__":
    main()
