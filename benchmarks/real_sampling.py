"""Sampling at real size: the embedded engine, `generate` and vLLM, each in the precision that suits it."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine import asker, cost_of, embedded, random_prompts
from engine_peers import PROGRAM, Prompts, generate, vllm_of
from real_model import (
    DTYPES,
    PRECISIONS,
    Cost,
    Note,
    Ratio,
    Size,
    matrix_rate,
    median,
    policy_of,
    read_rate,
    rounds,
)

from etude.algorithms.grpo import Grpo
from etude.core.call import Sampling
from etude.core.sample import Sample, Turn
from etude.inference.embedded import EmbeddedEngine
from etude.inference.engine import TokenRequest
from etude.learner.learner import Learner, LearnerOptions
from etude.models.policy import Policy

Way = Callable[[Prompts, int, int], Cost]
"""Prompts, tokens for each, and how many at a time."""
VLLM = tuple((name, compiled) for compiled in (False, True) for name in reversed(PRECISIONS))
"""Precisions of vLLM, and whether it compiles."""


def measure(size: Size, quick: bool, threads: int, note: Note) -> dict[str, Any]:
    """For each number of requests at a time the cost of all ways, and the machine's limit."""
    with ExitStack() as stack:
        policies = {name: policy_of(size, DTYPES[name]) for name in PRECISIONS}
        ways: dict[str, Way] = {}
        for name, policy in policies.items():
            engine = EmbeddedEngine(policy)
            stack.callback(lambda engine=engine: asyncio.run(engine.close()))
            ways[f"etude {name}"] = partial(cost_of, embedded(asker(engine), iter(range(2**60))))
        note(f"{size.name}: the settings of generate")
        chosen = {"generate": _fastest_generate(size, policies, ways)}
        note(f"{size.name}: the settings of vLLM")
        vllm = stack.enter_context(_fastest_vllm(size, policies["float32"], quick, threads, note))
        if vllm is not None:
            chosen["vllm"], ways["vllm"] = vllm
        limit = _limits(size, policies[PRECISIONS[-1]])
        found = {
            str(at_once): _measured(size, ways, at_once, size.rounds[quick], limit, note)
            for at_once in size.concurrencies
        }
    return {"settings": chosen, "limit": limit, "at_a_time": found}


def _measured(
    size: Size, ways: dict[str, Way], at_once: int, count: int, limit: dict[str, float], note: Note
) -> dict[str, Any]:
    note(f"{size.name}: {at_once} at a time")
    choose = random.Random(at_once)
    prompts = [random_prompts(choose, at_once, size.prompt) for _ in range(count + 1)]
    turn = {name: iter(prompts) for name in ways}

    def run(name: str) -> Cost:
        return ways[name](next(turn[name]), size.answer, at_once)

    costs = rounds({name: partial(run, name) for name in ways}, count)
    own = min((f"etude {name}" for name in PRECISIONS), key=lambda name: median(costs[name]))
    tokens = at_once * size.answer
    least, by = _least(size, at_once, limit)
    return {
        "tokens": tokens,
        "own": own.removeprefix("etude "),
        "tokens_per_cpu_s": {name: round(tokens / median(one)[0], 1) for name, one in costs.items()},
        "tokens_per_s": {name: round(tokens / median(one)[1], 1) for name, one in costs.items()},
        **{f"vs_{peer}": Ratio.of(costs[own], costs[peer]).as_json() for peer in PEERS if peer in costs},
        "share_of_limit": round(least / median(costs[f"etude {PRECISIONS[-1]}"])[0], 3),
        "limited_by": by,
    }


PEERS = ("generate", "vllm")


def _fastest_generate(size: Size, policies: dict[str, Policy], ways: dict[str, Way]) -> str:
    """The precision and cache that take the least at 8 requests; adds it to the ways."""
    prompts = random_prompts(random.Random(0), min(8, max(size.concurrencies)), size.prompt)
    found: list[tuple[float, str, Way]] = []
    for dtype, policy in policies.items():
        for cache in (None, "static"):
            way: Way = partial(cost_of, generate(policy, cache))
            way(prompts, size.answer, len(prompts))
            found.append(
                (way(prompts, size.answer, len(prompts))[0], f"{dtype}, {cache or 'dynamic'} cache", way)
            )
    _, name, ways["generate"] = min(found, key=lambda one: one[0])
    return name


@contextmanager
def _fastest_vllm(
    size: Size, policy: Policy, quick: bool, threads: int, note: Note
) -> Iterator[tuple[str, Way] | None]:
    """vLLM in the precision that takes the least at 8 requests (quick: the first); None without one."""
    prompts = random_prompts(random.Random(0), min(8, max(size.concurrencies)), size.prompt)
    found: list[tuple[float, str, bool]] = []
    if PROGRAM not in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for dtype, compiled in () if quick else VLLM:
            note(f"{size.name}: vLLM in {dtype}{', compiled' * compiled}")
            with vllm_of(policy, Path(folder), dtype, compiled=compiled, threads=threads) as vllm:
                assert vllm is not None
                vllm.cost(prompts, size.answer, len(prompts))
                found.append((vllm.cost(prompts, size.answer, len(prompts))[0], dtype, compiled))
        _, dtype, compiled = min(found, default=(0.0, *VLLM[0]))
        with vllm_of(policy, Path(folder), dtype, compiled=compiled, threads=threads) as vllm:
            assert vllm is not None
            yield f"{dtype}{', compiled' * compiled}", vllm.cost


def _limits(size: Size, policy: Policy) -> dict[str, float]:
    """Measured rates of the machine, in CPU time: of reading memory, and of products of many rows."""
    return {
        "read_gb_per_cpu_s": read_rate() / 1e9,
        "matrix_gflops_per_cpu_s": matrix_rate(policy, size.prompt * max(size.concurrencies)) / 1e9,
    }


def _least(size: Size, at_once: int, limit: dict[str, float]) -> tuple[float, str]:
    """The least CPU seconds in the last precision: prompts at the matrix rate, then each step's slower limit.

    A step reads all weights once, and multiplies them with each row; prompts need no head.
    """
    weights = size.parameters()
    layers = weights - size.config["vocab_size"] * size.config["hidden_size"]
    reading = DTYPES[PRECISIONS[-1]].itemsize * weights / limit["read_gb_per_cpu_s"] / 1e9
    of_a_row = 2.0 / limit["matrix_gflops_per_cpu_s"] / 1e9
    step = max(reading, of_a_row * weights * at_once)
    prompts = of_a_row * layers * size.prompt * at_once
    return prompts + (size.answer - 1) * step, "memory" if step == reading else "matrix products"


def mismatch(policy: Policy, prompt: int, answer: int) -> dict[str, float]:
    """Nats per token between what the engine says of tokens that it sampled and what the learner does.

    The mean of exp(d) - 1 - d with d the difference of the logprobs (Schulman, 2020): a run's `mismatch_kl`.
    """
    engine = EmbeddedEngine(policy)
    prompts = random_prompts(random.Random(0), 16, prompt)
    wanted = Sampling(max_tokens=answer)
    requests = [TokenRequest(tuple(ids), wanted, key, str(key)) for key, ids in enumerate(prompts)]
    found = asker(engine)(requests)
    asyncio.run(engine.close())
    samples = []
    for one in found:
        start, count = len(one.prompt_ids), len(one.ids)
        samples.append(
            Sample(
                ids=(*one.prompt_ids, *one.ids),
                mask=(False,) * start + (True,) * count,
                advantages=(0.0,) * start + (1.0,) * count,
                logprobs=(0.0,) * start + one.logprobs,
                turns=(Turn(start, start + count),),
            )
        )
    metrics = Learner(policy, LearnerOptions()).evaluate([(one,) for one in samples], Grpo())
    return {"kl": metrics["sampled_kl"], "tokens": float(sum(len(one.ids) for one in found))}
