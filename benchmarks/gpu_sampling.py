"""Sampling at real sizes: the embedded engine, `generate` and the continuous batching of `transformers`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from engine import asker, cost_of, embedded, random_prompts
from engine_peers import Sample, continuous, generate
from gpu_measuring import top_kernels
from gpu_model import Scale

from etude.inference.embedded import EmbeddedEngine
from etude.models.policy import Policy

Note = Callable[[str], None]


@dataclass
class Rates:
    """Tokens sampled a second of each way, so many requests at a time."""

    concurrency: int
    per_s: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Ways that were not measured, and why."""

    def as_json(self) -> dict[str, Any]:
        """Its part of the JSON."""
        own = self.per_s.get("etude")
        ratios = {
            f"ratio_vs_{peer}": round(own / rate, 2)
            for peer, rate in self.per_s.items()
            if own is not None and peer != "etude"
        }
        rates = {way: round(rate) for way, rate in self.per_s.items()}
        return {"concurrency": self.concurrency, "tokens_per_s": rates, "left_out": self.left_out, **ratios}


def measure(policy: Policy, scale: Scale, repeats: int, note: Note) -> list[Rates]:
    """All concurrencies; each way by the best of some tries after a first, as a try of it takes seconds."""
    engine = EmbeddedEngine(policy)
    ways: dict[str, Callable[[], Sample]] = {
        "etude": lambda: embedded(asker(engine), iter(range(2**60))),
        "generate": partial(generate, policy, None),
        "continuous": partial(continuous, policy, **scale.pages),
        # The last, as it is compiled for every number of requests.
        "generate static": partial(generate, policy, "static"),
    }
    found = [Rates(concurrency) for concurrency in scale.concurrencies]
    for way, make in ways.items():
        try:
            sample = make()
            for rates in found:
                note(f"{scale.name}, {way}, {rates.concurrency} at a time")
                rates.per_s[way] = _rate(sample, scale, rates.concurrency, repeats)
                note(f"… {rates.per_s[way]:.0f} tokens/s")
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it breaks by, the rest is to be measured
            for rates in found:
                if way not in rates.per_s:
                    rates.left_out[way] = f"{type(error).__name__}: {error}"
            if policy.device.type == "cuda":
                torch.cuda.empty_cache()
    asyncio.run(engine.close())
    return found


def _rate(sample: Sample, scale: Scale, concurrency: int, repeats: int) -> float:
    choose = random.Random(concurrency)
    walls = []
    for number in range(repeats + 1):
        prompts = random_prompts(choose, concurrency, scale.prompt)
        _, wall = cost_of(sample, prompts, scale.answer, concurrency)
        if number:  # The first is to warm up.
            walls.append(wall)
    return concurrency * scale.answer / min(walls)


def kernels(policy: Policy, scale: Scale) -> list[dict[str, Any]]:
    """Shares of the engine's time at the highest concurrency."""
    engine = EmbeddedEngine(policy)
    own, count = embedded(asker(engine), iter(range(2**60))), max(scale.concurrencies)
    prompts = random_prompts(random.Random(0), count, scale.prompt)
    own(prompts, scale.answer)
    found = top_kernels(lambda: own(prompts, min(scale.answer, 16)), policy.device)
    asyncio.run(engine.close())
    return found
