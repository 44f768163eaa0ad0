"""The cost of sampling: the embedded engine against `generate`, continuous batching, and a real vLLM.

The same model in float32 with one thread; prompts of 32 random tokens, 64 sampled for each (32 with the
larger model), with their logprobs, 1, 8 or 64 at a time. CPU time is that of the process that samples,
and the ways take turns with prompts that are new each time. vLLM is left out where ETUDE_TEST_VLLM does not
name its program (docs/server.md says how to install one). And what it is worth to keep what was read.

With `--schema` only what it costs to hold 64 answers at a time to a JSON schema, the two ways in turns.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import parse_arguments, print_json, print_table, progress, silent
from engine_peers import Prompts, Sample, continuous, generate, vllm_of
from engine_schema import FORM, Cost, Pairs, measure_pairs, print_schema, schema_json

from etude.core.call import Constraint, Sampling
from etude.inference.embedded import EmbeddedEngine
from etude.inference.engine import Sampled, TokenRequest
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

# vLLM takes no heads smaller than 32; the demos' have 16.
SMALL, LARGE = "0.13M", "30M"
MODELS = {
    SMALL: (512, TinyShape(heads=2, max_context=1024)),
    LARGE: (8192, TinyShape(512, layers=8, heads=8, intermediate_size=1536, max_context=1024)),
}
"""Size of the vocabulary, and shape."""
CONCURRENCIES = (1, 8, 64)
PROMPT = 32
ANSWER = {SMALL: 64, LARGE: 32}
PAIRS = {SMALL: 40, LARGE: 12}
"""Of runs with and without a schema."""
GOALS = {
    "generate": {8: 3.0, 64: 1.5},
    "vllm": {1: 1.3, 8: 1.3, 64: 1.3},
}
"""With the small model; with the large one, to be level with vLLM."""


@dataclass(slots=True)
class Costs:
    """CPU and wall seconds of each repetition."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, so many requests at a time, and the tokens sampled a second of each way."""

    model: str
    concurrency: int
    per_cpu_s: dict[str, float]
    per_wall_s: dict[str, float]

    def ratio(self, peer: str) -> float | None:
        """How many times as long a peer takes in CPU time; None for one that was not there."""
        return self.per_cpu_s["etude"] / self.per_cpu_s[peer] if peer in self.per_cpu_s else None


def model(name: str, context: int = 1024) -> Policy:
    """One of MODELS with random weights, that never stops by itself."""
    size, shape = MODELS[name][0], replace(MODELS[name][1], max_context=context)
    tokenizer = build_tokenizer(["what is 1 plus 2? it is 3."], vocab_size=512)
    tokenizer.add_tokens([f"<{number}>" for number in range(size - len(tokenizer))])
    policy = build_policy(tokenizer, 0, shape)
    policy.stop_ids = frozenset()
    return policy


def random_prompts(choose: random.Random, count: int, length: int = PROMPT) -> list[list[int]]:
    """Prompts that have nothing in common."""
    return [[choose.randrange(7, 400) for _ in range(length)] for _ in range(count)]


Ask = Callable[[Sequence[TokenRequest]], list[Sampled]]
"""Sends all requests at once and waits for all answers."""


def asker(engine: EmbeddedEngine) -> Ask:
    """In one event loop, as programs have it."""
    loop = asyncio.new_event_loop()
    return lambda requests: loop.run_until_complete(_all(engine, requests))


def embedded(ask: Ask, names: Iterator[int], constraint: Constraint | None = None) -> Sample:
    """Etude's engine; each request is a conversation of its own."""

    def sample(prompts: Prompts, tokens: int) -> list[int]:
        wanted = Sampling(max_tokens=tokens, constraint=constraint)
        requests = [
            TokenRequest(tuple(prompt), wanted, key, str(next(names))) for key, prompt in enumerate(prompts)
        ]
        return [len(one.logprobs) for one in ask(requests)]

    return sample


async def _all(engine: EmbeddedEngine, requests: Sequence[TokenRequest]) -> list[Sampled]:
    return await asyncio.gather(*(engine.sample(request) for request in requests))


def cost_of(sample: Sample, prompts: Prompts, tokens: int, at_once: int) -> tuple[float, float]:
    """CPU and wall seconds of continuing all prompts, so many at a time."""
    wall, cpu = time.perf_counter(), time.process_time()
    counts = [
        count
        for at in range(0, len(prompts), at_once)
        for count in sample(prompts[at : at + at_once], tokens)
    ]
    found = time.process_time() - cpu, time.perf_counter() - wall
    if counts != [tokens] * len(prompts):
        raise SystemExit(f"{counts} tokens were sampled, and {tokens} each were wanted")
    return found


def measure(name: str, concurrency: int, ways: dict[str, Any], repeats: int) -> Setting:
    """Medians of all ways, which take turns."""
    choose, count, tokens = random.Random(concurrency), max(concurrency, 4), ANSWER[name]
    costs = {way: Costs() for way in ways}
    for number in range(repeats + 1):
        prompts = random_prompts(choose, count)
        for way, cost in ways.items():
            cpu, wall = cost(prompts, tokens, concurrency)
            if number:  # The first is to warm up.
                costs[way].cpu.append(cpu)
                costs[way].wall.append(wall)
    sampled = count * tokens
    return Setting(
        name,
        concurrency,
        {way: sampled / statistics.median(cost.cpu) for way, cost in costs.items()},
        {way: sampled / statistics.median(cost.wall) for way, cost in costs.items()},
    )


def fastest_generate(policy: Policy) -> Sample:
    """Of the caches that `generate` has, the faster one at 8 requests."""
    prompts = random_prompts(random.Random(0), 8)
    samples = [generate(policy, cache) for cache in (None, "static")]
    costs = [min(cost_of(sample, prompts, 32, 8)[0] for _ in range(3)) for sample in samples]
    return samples[costs.index(min(costs))]


def conversations(own: Sample, ask: Ask, choose: random.Random, *, keep: bool, prompt: int = 210) -> float:
    """CPU seconds of 8 conversations of 6 turns after a prompt, 40 tokens sampled and 20 told a turn.

    Without `keep` each turn begins with another token, so that nothing of the last one is of use.
    """
    wanted, cpu = Sampling(max_tokens=40), time.process_time()
    contexts = random_prompts(choose, 8, prompt)
    run = choose.randrange(2**40)
    for turn in range(6):
        if not keep:
            for context in contexts:
                context[0] = turn
        requests = [
            TokenRequest(tuple(context), wanted, key, f"{run}-{key}") for key, context in enumerate(contexts)
        ]
        found = ask(requests)
        told = random_prompts(choose, 8, 20)
        contexts = [[*one.prompt_ids, *one.ids, *more] for one, more in zip(found, told, strict=True)]
    return time.process_time() - cpu


def long_conversations(own: Sample, ask: Ask, choose: random.Random, *, keep: bool) -> float:
    """The same after a prompt of 640 tokens."""
    return conversations(own, ask, choose, keep=keep, prompt=640)


def samples_of_one(own: Sample, ask: Ask, choose: random.Random, *, keep: bool) -> float:
    """CPU seconds of 8 samples of 32 tokens after each of 8 prompts of 256; without `keep`, of 64 prompts."""
    prompts = random_prompts(choose, 8 if keep else 64, 256)
    return cost_of(own, prompts * (8 if keep else 1), 32, 64)[0]


def worth(kind: Callable[..., float], own: Sample, ask: Ask, repeats: int) -> float:
    """How many times as long it takes when nothing is kept; medians that take turns."""
    costs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats + 1):
        for keep, found in costs.items():
            seconds = kind(own, ask, random.Random(number), keep=keep)
            if number:
                found.append(seconds)
    return statistics.median(costs[False]) / statistics.median(costs[True])


def measure_all(quick: bool, note: Callable[[str], None]) -> tuple[list[Setting], dict[str, float]]:
    """All settings, and what is kept is worth; `note` is told what is measured next."""
    torch.set_num_threads(1)
    settings: list[Setting] = []
    kept: dict[str, float] = {}
    for name in [SMALL] if quick else MODELS:
        policy = model(name)
        engine = EmbeddedEngine(policy)
        ask = asker(engine)
        own = embedded(ask, iter(range(2**60)))
        with tempfile.TemporaryDirectory() as folder, vllm_of(policy, Path(folder) / "model") as vllm:
            peer = fastest_generate(policy)
            for concurrency in CONCURRENCIES:
                note(f"{name}, {concurrency} at a time")
                samples = {"etude": own, "generate": peer, "continuous": continuous(policy)}
                ways = {way: partial(cost_of, sample) for way, sample in samples.items()}
                settings.append(measure(name, concurrency, ways | ({"vllm": vllm.cost} if vllm else {}), 5))
        if name == SMALL:
            note(f"{name}, what is kept")
            kinds = conversations, long_conversations, samples_of_one
            kept = {kind.__name__: worth(kind, own, ask, 5) for kind in kinds}
        asyncio.run(engine.close())
    return settings, kept


def measure_schema(quick: bool, note: Callable[[str], None]) -> list[Pairs]:
    """Sampling 64 at a time with and without a schema."""
    torch.set_num_threads(1)
    names = iter(range(2**60))

    def costs_of(engine: EmbeddedEngine) -> tuple[Cost, Cost]:
        ask = asker(engine)
        return partial(cost_of, embedded(ask, names)), partial(cost_of, embedded(ask, names, FORM))

    measured = []
    for name in [SMALL] if quick else MODELS:
        note(f"{name}, 64 at a time with and without a schema")
        pairs = 8 if quick else PAIRS[name]
        measured.append(measure_pairs(name, model(name), costs_of, pairs=pairs, tokens=ANSWER[name]))
    return measured


def as_json(settings: Sequence[Setting], kept: dict[str, float]) -> dict[str, Any]:
    """The object that `--json` prints; the ratios are those of the first model."""
    first = [one for one in settings if one.model == SMALL]
    return {
        **{
            f"ratio_vs_{peer}": {str(one.concurrency): _rounded(one.ratio(peer)) for one in first}
            for peer in ("generate", "continuous", "vllm")
        },
        "ratio_kept_conversations": round(kept["conversations"], 2),
        "ratio_kept_long_conversations": round(kept["long_conversations"], 2),
        "ratio_shared_prompts": round(kept["samples_of_one"], 2),
        "versions": versions(),
        "settings": [
            {
                "model": one.model,
                "concurrency": one.concurrency,
                "tokens_per_cpu_s": {way: round(rate) for way, rate in one.per_cpu_s.items()},
                "tokens_per_s": {way: round(rate) for way, rate in one.per_wall_s.items()},
                "ratio_vs_generate": _rounded(one.ratio("generate")),
                "ratio_vs_continuous": _rounded(one.ratio("continuous")),
                "ratio_vs_vllm": _rounded(one.ratio("vllm")),
            }
            for one in settings
        ],
    }


def versions() -> dict[str, str]:
    """Of what was measured."""
    return {name: version(name) for name in ("torch", "transformers")}


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 2)


def print_results(settings: Sequence[Setting], kept: dict[str, float]) -> None:
    """The table, with the goals."""
    ways = ("etude", "generate", "continuous", "vllm")
    rows = []
    for one in settings:
        ratios = []
        for peer in ways[1:]:
            goal = GOALS.get(peer, {}).get(one.concurrency) if one.model == SMALL else None
            goal = 1.0 if peer == "vllm" and one.model != SMALL else goal
            ratio = one.ratio(peer)
            ratios.append(("-" if ratio is None else f"{ratio:.2f}") + (f" ({goal:g})" if goal else ""))
        rates = [f"{one.per_cpu_s[way]:.0f}" if way in one.per_cpu_s else "-" for way in ways]
        rows.append([f"{one.model}, {one.concurrency}", *rates, *ratios])
    peers = ["generate", "continuous", "vLLM"]
    print_table(
        "Tokens sampled in a CPU second, with logprobs",
        ["", "etude", *peers, *(f"x {peer}" for peer in peers)],
        rows,
        [
            "x: how many times as long a peer takes (the goal)",
            f"{SMALL}: conversations that keep their cache are {kept['conversations']:.1f} times as fast, "
            f"long ones {kept['long_conversations']:.1f} times, and 64 samples of 8 prompts "
            f"{kept['samples_of_one']:.1f} times as fast as of 64",
            ", ".join(f"{name} {number}" for name, number in versions().items()),
        ],
    )


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "", schema="only what a JSON schema costs")
    if arguments.schema:
        measured = measure_schema(arguments.quick, silent if arguments.json else progress)
        if arguments.json:
            print_json(schema_json(measured))
        else:
            print_schema(measured)
        return
    found = measure_all(arguments.quick, silent if arguments.json else progress)
    if arguments.json:
        print_json(as_json(*found))
    else:
        print_results(*found)


if __name__ == "__main__":
    main()
