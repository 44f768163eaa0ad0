"""The cost of sampling: the embedded engine against `generate`, continuous batching, and a real vLLM.

The same model in float32 with one thread; prompts of 32 random tokens, 64 sampled for each (32 with the
larger model), with their logprobs, 1, 8 or 64 at a time. CPU time is the sampling process's,
and the ways take turns with prompts that are new each time. vLLM is left out where ETUDE_TEST_VLLM does not
name its program (docs/backends.md#vllm says how to install one). And what it is worth to keep what was read.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from common import parse_arguments, print_json, print_table, progress, silent
from transformers import GenerationConfig
from transformers.utils import logging as hf_logging

from etude.core.call import ChatRequest, Completion, Constraint, Sampling
from etude.engines.embedded import EmbeddedEngine
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

PROGRAM = "ETUDE_TEST_VLLM"
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Prompts = Sequence[Sequence[int]]
Sample = Callable[[Prompts, int], list[int]]
"""Continues all prompts at once by so many tokens; gives how many logprobs it found for each."""


def generate(policy: Policy, cache: str | None) -> Sample:
    """`model.generate` with a kind of cache, and the logprobs of what was sampled."""
    model = _copy_model(policy)

    @torch.inference_mode()
    def sample(prompts: Prompts, tokens: int) -> list[int]:
        ids_BT = torch.tensor(prompts, device=model.device)
        found = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new_BT = found.sequences[:, ids_BT.shape[1] :]
        logprobs_BTV = torch.stack(found.logits, dim=1).log_softmax(-1)
        return [len(row) for row in logprobs_BTV.gather(2, new_BT[..., None])[..., 0].tolist()]

    return sample


def continuous(
    policy: Policy, page_size: int = 32, num_blocks: int = 512, max_batch_tokens: int = 256
) -> Sample:
    """`model.generate_batch`, whose manager is kept, and stays as large as its first batch needs it.

    By default with the fastest of several sizes that were tried for small models on a CPU; with its own
    choice it takes half as long again.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _copy_model(policy)
    # Earlier releases know pages as blocks.
    of_pages = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    wanted = ContinuousBatchingConfig(
        return_logprobs=True,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        **{of_pages: page_size},
    )

    def sample(prompts: Prompts, tokens: int) -> list[int]:
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=-1)
        found = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=wanted,
            persistent_manager=True,
        )
        return [len(one.logprobs) for one in found.values()]

    return sample


def _copy_model(policy: Policy) -> Any:
    """A model of one's own, that never stops by itself."""
    hf_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = copy.deepcopy(policy.model)
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Vllm:
    """A vLLM in a process of its own, which measures itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cost(self, prompts: Prompts, tokens: int, at_once: int) -> tuple[float, float]:
        """CPU and wall seconds of continuing all prompts, so many at a time."""
        asked = {"prompts": [list(prompt) for prompt in prompts], "tokens": tokens, "at_once": at_once}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found = self._answer()
        if found["counts"] != [tokens] * len(prompts):
            raise SystemExit(f"vLLM gave {found['counts']} logprobs, and {tokens} each were wanted")
        return found["cpu"], found["wall"]

    def wait(self) -> None:
        """Until it is ready."""
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended; run it with the model to see why")
        return dict(json.loads(line))


_VLLM_PROGRAM = """
import json, os, sys, time

# What it logs may go to standard output; the answers are to have that for themselves.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams

engine = LLM(
    model=sys.argv[1],
    dtype=sys.argv[2],
    enforce_eager="compiled" not in sys.argv[3:],
    max_model_len=1024,
    max_num_seqs=64,
    logprobs_mode="processed_logprobs",
    disable_log_stats=True,
)
print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    # No detokenising, and the sampled token's logprob alone: the least that it can do.
    wanted = SamplingParams(max_tokens=asked["tokens"], ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    wall, cpu = time.perf_counter(), time.process_time()
    found = [
        output
        for at in range(0, len(prompts), asked["at_once"])
        for output in engine.generate(prompts[at : at + asked["at_once"]], wanted, use_tqdm=False)
    ]
    cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    counts = [len(output.outputs[0].logprobs) for output in found]
    print(json.dumps(cost | {"counts": counts}), file=answers, flush=True)
"""
"""In vLLM's own environment, without Etude: a JSON object a line in, one out."""


@contextmanager
def start_vllm(
    policy: Policy, folder: Path, dtype: str = "float32", *, compiled: bool = False, threads: int = 1
) -> Iterator[Vllm | None]:
    """A vLLM for the policy, where ETUDE_TEST_VLLM names its program."""
    program = os.environ.get(PROGRAM)
    if not program:
        yield None
        return
    policy.export(folder)
    process = subprocess.Popen(
        [Path(program).with_name("python"), "-c", _VLLM_PROGRAM, folder, dtype, *["compiled"] * compiled],
        env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        vllm = Vllm(process)
        print("waiting for vLLM", file=sys.stderr, flush=True)
        vllm.wait()
        yield vllm
    finally:
        process.kill()
        process.wait()


# vLLM takes no heads smaller than 32; the demos' have 16.
SMALL, LARGE = "0.13M", "30M"
MODELS = {
    SMALL: (512, TinyShape(heads=2, max_context=1024)),
    LARGE: (8192, TinyShape(512, layers=8, heads=8, intermediate_size=1536, max_context=1024)),
}
"""Size of the vocabulary, and shape."""
CONCURRENCIES = (1, 8, 64)
ROUNDS = 5
PROMPT = 32
ANSWER = {SMALL: 64, LARGE: 32}
"""Of runs with and without a schema."""
GOALS = {"generate": {8: 3.0, 64: 1.5}, "vllm": {1: 1.3, 8: 1.3, 64: 1.3}}
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


Ask = Callable[[Sequence[ChatRequest]], list[Completion]]
"""Sends all requests at once and waits for all answers."""


def asker(engine: EmbeddedEngine) -> Ask:
    """In one event loop, as programs have it."""
    loop = asyncio.new_event_loop()
    return lambda requests: loop.run_until_complete(_all(engine, requests))


def embedded_engine(ask: Ask, names: Iterator[int], constraint: Constraint | None = None) -> Sample:
    """Etude's engine; each request is a conversation of its own."""

    def sample(prompts: Prompts, tokens: int) -> list[int]:
        wanted = Sampling(max_tokens=tokens, constraint=constraint)
        requests = [
            ChatRequest((), (), wanted, key, str(next(names)), prompt=tuple(prompt))
            for key, prompt in enumerate(prompts)
        ]
        return [len(one.logprobs) for one in ask(requests)]

    return sample


async def _all(engine: EmbeddedEngine, requests: Sequence[ChatRequest]) -> list[Completion]:
    return await asyncio.gather(*(engine.sample(request) for request in requests))


def measure_cost(sample: Sample, prompts: Prompts, tokens: int, at_once: int) -> tuple[float, float]:
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


def measure(name: str, concurrency: int, ways: dict[str, Any]) -> Setting:
    """Medians of all ways, which take turns."""
    choose, count, tokens = random.Random(concurrency), max(concurrency, 4), ANSWER[name]
    costs = {way: Costs() for way in ways}
    for number in range(ROUNDS + 1):
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
    costs = [min(measure_cost(sample, prompts, 32, 8)[0] for _ in range(3)) for sample in samples]
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
            ChatRequest((), (), wanted, key, f"{run}-{key}", prompt=tuple(context))
            for key, context in enumerate(contexts)
        ]
        found = ask(requests)
        told = random_prompts(choose, 8, 20)
        contexts = [
            [*one.prompt_ids, *one.completion_ids, *more] for one, more in zip(found, told, strict=True)
        ]
    return time.process_time() - cpu


def long_conversations(own: Sample, ask: Ask, choose: random.Random, *, keep: bool) -> float:
    """The same after a prompt of 640 tokens."""
    return conversations(own, ask, choose, keep=keep, prompt=640)


def samples_of_one(own: Sample, ask: Ask, choose: random.Random, *, keep: bool) -> float:
    """CPU seconds of 8 samples of 32 tokens after each of 8 prompts of 256; without `keep`, of 64 prompts."""
    prompts = random_prompts(choose, 8 if keep else 64, 256)
    return measure_cost(own, prompts * (8 if keep else 1), 32, 64)[0]


def worth(kind: Callable[..., float], own: Sample, ask: Ask) -> float:
    """How many times as long it takes when nothing is kept; medians that take turns."""
    costs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS + 1):
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
        own = embedded_engine(ask, iter(range(2**60)))
        with tempfile.TemporaryDirectory() as folder, start_vllm(policy, Path(folder) / "model") as vllm:
            peer = fastest_generate(policy)
            for concurrency in CONCURRENCIES:
                note(f"{name}, {concurrency} at a time")
                samples = {"etude": own, "generate": peer, "continuous": continuous(policy)}
                ways = {way: partial(measure_cost, sample) for way, sample in samples.items()}
                settings.append(measure(name, concurrency, ways | ({"vllm": vllm.cost} if vllm else {})))
        if name == SMALL:
            note(f"{name}, what is kept")
            kinds = conversations, long_conversations, samples_of_one
            kept = {kind.__name__: worth(kind, own, ask) for kind in kinds}
        asyncio.run(engine.close())
    return settings, kept


def as_json(settings: Sequence[Setting], kept: dict[str, float]) -> dict[str, Any]:
    """The object that `--json` prints; the ratios are the first model's."""
    first = [one for one in settings if one.model == SMALL]
    return {
        **{
            f"ratio_vs_{peer}": {str(one.concurrency): _round_ratio(one.ratio(peer)) for one in first}
            for peer in ("generate", "continuous", "vllm")
        },
        "ratio_kept_conversations": round(kept["conversations"], 2),
        "ratio_kept_long_conversations": round(kept["long_conversations"], 2),
        "ratio_shared_prompts": round(kept["samples_of_one"], 2),
        "settings": [
            {
                "model": one.model,
                "concurrency": one.concurrency,
                "tokens_per_cpu_s": {way: round(rate) for way, rate in one.per_cpu_s.items()},
                "tokens_per_s": {way: round(rate) for way, rate in one.per_wall_s.items()},
                "ratio_vs_generate": _round_ratio(one.ratio("generate")),
                "ratio_vs_continuous": _round_ratio(one.ratio("continuous")),
                "ratio_vs_vllm": _round_ratio(one.ratio("vllm")),
            }
            for one in settings
        ],
    }


def _round_ratio(ratio: float | None) -> float | None:
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
        ],
    )


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "")
    found = measure_all(arguments.quick, silent if arguments.json else progress)
    if arguments.json:
        print_json(as_json(*found), {"rounds in turns": ROUNDS})
    else:
        print_results(*found)


if __name__ == "__main__":
    main()
