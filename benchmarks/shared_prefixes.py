"""Steps of rows that share a prompt: CPU time against that of rows whose prompts have nothing in common.

8 and 32 rows after prompts of 1,000 random tokens, and 8 times 8 after prompts of 32; Llamas of 0.13M and
30M parameters in float32, and the larger one in bfloat16 too where the CPU multiplies that, with one thread.
The two take turns, step by step.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from common import parse_arguments, print_json, print_table
from engine import LARGE, SMALL, model, random_prompts
from real_model import DTYPES, PRECISIONS

from etude.core.call import Sampling
from etude.inference.decoder import Decoder, make_decoder
from etude.inference.sampler import Row, uniforms
from etude.models.policy import Policy

LOADS = {
    "8 rows, 1000 tokens": (1, 8, 1000),
    "32 rows, 1000": (1, 32, 1000),
    "8 times 8 rows, 32": (8, 8, 32),
}
"""Prompts, rows of each, and their length."""


def reader(policy: Policy, prompts: list[list[int]]) -> tuple[Decoder, list[Row]]:
    """Rows that have read their prompts, and speak."""
    decoder = make_decoder(policy, slots=64, deterministic=False)
    rows = [Row(str(n), ids, Sampling(), uniforms(n)) for n, ids in enumerate(prompts)]
    while not all(row.logprobs for row in rows):
        decoder.step(rows)
    return decoder, rows


def milliseconds(policy: Policy, groups: int, each: int, length: int, steps: int) -> dict[str, float]:
    """Median CPU time of a step, of rows that share prompts and of others."""
    choose = random.Random(0)
    shared = [list(ids) for ids in random_prompts(choose, groups, length) for _ in range(each)]
    ways = {"shared": shared, "apart": random_prompts(choose, groups * each, length)}
    readers = {way: reader(policy, prompts) for way, prompts in ways.items()}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, (decoder, rows) in readers.items():
            start = time.process_time()
            decoder.step(rows)
            costs[way].append(time.process_time() - start)
    return {way: round(1000 * statistics.median(found), 2) for way, found in costs.items()}


def measure(quick: bool) -> dict[str, dict[str, float]]:
    """By model and load."""
    torch.set_num_threads(1)
    found = {}
    models = [(SMALL, torch.float32, 160)]
    if not quick:
        models += [(LARGE, DTYPES[precision], 48) for precision in PRECISIONS]
    for size, dtype, steps in models:
        policy = model(size, context=2048)
        policy.model.to(dtype)
        name = size if dtype == torch.float32 else f"{size} in bfloat16"
        for load, (groups, each, length) in LOADS.items():
            found[f"{name}, {load}"] = milliseconds(policy, groups, each, length, steps)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "")
    found: dict[str, Any] = measure(arguments.quick)
    if arguments.json:
        print_json(found)
        return
    rows = [[name, f"{one['shared']:g}", f"{one['apart']:g}"] for name, one in found.items()]
    columns = ["", "shared, CPU ms", "apart, CPU ms"]
    print_table("A step of rows with shared prompts", columns, rows, ["medians of all steps"])


if __name__ == "__main__":
    main()
