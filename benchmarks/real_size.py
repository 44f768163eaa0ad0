"""Models of real size on a few cores: the cost of steps and sampled tokens, against peers and the limit.

SmolLM2-135M's shape and Qwen2.5-0.5B's with random weights. `--only PART` measures one of the parts: `step`
(gradients and whole steps of GRPO, and TRL), `sampling` (the embedded engine, `generate`, and vLLM where
ETUDE_TEST_VLLM names its program), `mismatch` (what engine and learner differ by in bfloat16), `run` (`etude
train` on the calculator). Each is in float32, and in bfloat16 where the CPU multiplies it. All ways take
turns; ratios are of CPU time, the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import print_json, print_table, progress, silent
from demo import run
from engine import PROGRAM, Prompts, asker, embedded, generate, measure_cost, random_prompts, start_vllm
from gpu import FULL, SMALL, Way, count_work

from etude.algorithms.grpo import Grpo
from etude.core.call import ChatRequest, Sampling
from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.sample import Sample, Turn
from etude.engines.embedded import EmbeddedEngine
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule
from etude.models.device import multiplies_bfloat16_faster
from etude.models.policy import Policy
from etude.models.tiny import build_tokenizer, conversation_texts
from etude.rollout.reply import describe_tools
from learner import Step, conversations, groups, long, short, steps

Cost = tuple[float, float]
"""CPU and wall seconds."""
Note = Callable[[str], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS = tuple(DTYPES) if multiplies_bfloat16_faster() else ("float32",)
"""Those that this CPU multiplies."""


@dataclass(frozen=True)
class Size:
    """The shape of a model, and what is asked of it."""

    name: str
    kind: str
    """Its `model_type`."""
    config: dict[str, Any]
    shapes: dict[str, Callable[[random.Random], list[Sample]]]
    rows: tuple[int, ...] = (2, 8)
    """Rows at a time, for TRL: as far as memory takes them, or 1."""
    concurrencies: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    answer: int = 32
    rounds: tuple[int, int] = (5, 2)
    """In which all ways take turns: in full, and with `--quick`."""
    initializer_range: float = 0.02

    def parameters(self) -> int:
        """Numbers of the model, each of which is read for a token."""
        with torch.device("meta"):
            return sum(one.numel() for one in _model(self, torch.float32).parameters())


def turns(choose: random.Random) -> list[Sample]:
    """4 conversations of 4 turns after a prompt of 232 tokens: 16 calls, each a sequence of its own."""
    return conversations(choose, prompt=232, answer=(20, 60), told=(10, 30), count=4, turns=4)


def talk(choose: random.Random) -> list[Sample]:
    """One conversation of 6 turns up to 7,500 tokens: 6 calls, each a sequence of its own."""
    return conversations(choose, prompt=1024, answer=(384, 640), told=(512, 768), count=1, turns=6)


SHAPES = {"short": short, "long": long, "turns": turns, "talk": talk}
SMOLLM = Size(
    "SmolLM2-135M",
    "llama",
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 1e5,
    },
    SHAPES,
)
QWEN = Size("Qwen2.5-0.5B", "qwen2", FULL.model, {"turns": turns}, rows=(2,), answer=16, rounds=(3, 1))
LOOK = Size(
    "look",
    "llama",
    SMALL.model,
    {"turns": lambda choose: groups(choose, 1, prompt=(24, 24), completion=(4, 8))},
    rows=(2,),
    concurrencies=(1, 2),
    prompt=8,
    answer=4,
    rounds=(1, 1),
)
"""Everything small: whether it runs."""


def make_policy(size: Size, dtype: torch.dtype, tokenizer: Any = None) -> Policy:
    """A policy with random weights, that never stops by itself unless `tokenizer` is its own."""
    own = tokenizer or build_tokenizer(["what is 1 plus 2? it is 3."], vocab_size=512)
    torch.manual_seed(0)
    model = _model(size, dtype, eos=own.eos_token_id, pad=own.pad_token_id)
    policy = Policy(model, own, size.name, torch.device("cpu"))
    if tokenizer is None:
        policy.stop_ids = frozenset()
    return policy


def _model(size: Size, dtype: torch.dtype, eos: int = 1, pad: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        size.kind,
        **size.config,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=size.initializer_range,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def timed(step: Callable[[], Any]) -> Cost:
    """CPU time of this process and all of its threads, and wall time."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def rounds(ways: dict[str, Callable[[], Cost]], count: int) -> dict[str, list[Cost]]:
    """The costs of ways that take turns, after a first round that is not counted."""
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(count + 1):
        for name, way in ways.items():
            cost = way()
            if number:
                found[name].append(cost)
    return found


def median(costs: Sequence[Cost]) -> Cost:
    """Of CPU seconds and of wall seconds."""
    return statistics.median(cpu for cpu, _ in costs), statistics.median(wall for _, wall in costs)


@dataclass(frozen=True)
class Ratio:
    """How many times as long another way takes: the medians over rounds in which both were run."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]
    """Of each round."""

    @classmethod
    def of(cls, own: Sequence[Cost], other: Sequence[Cost]) -> Ratio:
        """Pair by pair."""
        pairs = list(zip(own, other, strict=True))
        return cls(tuple(b[0] / a[0] for a, b in pairs), tuple(b[1] / a[1] for a, b in pairs))

    @property
    def middle(self) -> float:
        """The median in CPU time, which is the steadier one."""
        return round(statistics.median(self.cpu), 2)

    def as_json(self) -> dict[str, Any]:
        """Medians, ranges and their number."""

        def told(values: Sequence[float]) -> dict[str, float]:
            return {
                "median": round(statistics.median(values), 3),
                "low": round(min(values), 3),
                "high": round(max(values), 3),
            }

        return {"n": len(self.cpu), "cpu": told(self.cpu), "wall": told(self.wall)}


def matrix_rate(policy: Policy, rows: int) -> float:
    """Multiplications and additions in a second of CPU time: those of torch's own linear layers.

    All of one layer of the model, one after the other, on so many tokens, forward only.
    """
    layer = policy.model.model.layers[0]
    weights = [one.detach() for one in layer.parameters() if one.dim() == 2]
    inputs = {
        size: torch.randn(rows, size, dtype=policy.model.dtype) for size in {one.shape[1] for one in weights}
    }
    flops = 2.0 * rows * sum(one.numel() for one in weights)

    @torch.inference_mode()
    def product() -> None:
        for one in weights:
            torch.nn.functional.linear(inputs[one.shape[1]], one)

    repeats = min(100, max(1, int(2e10 / flops)))
    cpu, _ = median(rounds({"": partial(timed, lambda: [product() for _ in range(repeats)])}, 9)[""])
    return repeats * flops / cpu


def read_rate() -> float:
    """Bytes that can be read from memory in a second of CPU time: those of a sum."""
    numbers = torch.ones(2**27)
    cpu, _ = median(rounds({"": partial(timed, numbers.sum)}, 9)[""])
    return numbers.nbytes / cpu


TRIED = 4
"""Sequences that TRL's settings are tried with, before the fastest takes a whole step."""
HELD = 4096
"""Tokens that TRL has at a time at most, where a row is not longer: twice as many took 13 GB."""


def measure_steps(size: Size, quick: bool, note: Note) -> dict[str, Any]:
    """For each shape the cost of a gradient, of the whole step, and of TRL's gradient."""
    policies = {name: make_policy(size, DTYPES[name]) for name in PRECISIONS}
    shapes = ["turns"] if quick else size.shapes
    return {shape: _step_measured(size, shape, policies, size.rounds[quick], note) for shape in shapes}


def _step_measured(
    size: Size, shape: str, policies: dict[str, Policy], count: int, note: Note
) -> dict[str, Any]:
    sequences = size.shapes[shape](random.Random(0))
    units = [(one,) for one in sequences]
    note(f"{size.name}, {shape}: TRL's settings")
    chosen, trl = _fastest_trl(size, policies, sequences)
    note(f"{size.name}, {shape}: {count} rounds, TRL with {chosen}")
    own = {name: Way(policy, units, "tree", 16384) for name, policy in policies.items()}
    ways: dict[str, Step] = {**own, **{f"{name} step": way.whole for name, way in own.items()}, "trl": trl}
    costs = rounds({name: partial(timed, step) for name, step in ways.items()}, count)
    best = min(PRECISIONS, key=lambda name: median(costs[name]))
    work = count_work(sequences, tree=True)
    rate, flops = matrix_rate(policies[best], work.tokens), work.flops(policies[best])
    whole = {name: costs[f"{name} step"] for name in PRECISIONS}
    return {
        "tokens": sum(len(one.ids) for one in sequences),
        "distinct_tokens": work.tokens,
        "trained_tokens": work.choices,
        "cpu_s": {name: round(median(found)[0], 3) for name, found in costs.items()},
        "wall_s": {name: round(median(found)[1], 3) for name, found in costs.items()},
        "trl": chosen,
        "own": best,
        "speedup_bf16": Ratio.of(whole["bfloat16"], whole["float32"]).as_json() if len(whole) > 1 else None,
        "vs_trl": Ratio.of(costs[best], costs["trl"]).as_json(),
        "tflop": round(flops / 1e12, 3),
        "matrix_gflops_per_cpu_s": round(rate / 1e9, 1),
        "share_of_limit": round(flops / rate / median(whole[best])[0], 3),
        "notes": [way.learner.note for way in own.values() if way.learner.note],
    }


def _fastest_trl(size: Size, policies: dict[str, Policy], sequences: Sequence[Sample]) -> tuple[str, Step]:
    """The precision, and how many rows at a time, that take the least for a few sequences in all places."""
    few = sequences[:: max(1, len(sequences) // TRIED)][:TRIED]
    longest = max(len(one.ids) for one in sequences)
    counts = [count for count in size.rows if count * longest <= HELD] or [1]
    found = []
    for dtype, policy in policies.items():
        candidates = steps("grpo", policy, few, counts)
        # All rows of a step at once would not fit into memory.
        for rows in map(str, counts):
            candidates[rows]()
            found.append((timed(candidates[rows])[0], dtype, rows))
            _drop_gradient(candidates[rows])
    _, dtype, rows = min(found)
    step = steps("grpo", policies[dtype], sequences, [int(rows)])[rows]

    def fresh() -> None:
        step()
        _drop_gradient(step)

    return f"{dtype}, {rows} rows at a time", fresh


def _drop_gradient(step: Step) -> None:
    """A peer's gradient is not to be in memory while others are measured."""
    step.model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]


Sampler = Callable[[Prompts, int, int], Cost]
"""Prompts, tokens for each, and how many at a time."""
VLLM = tuple((name, compiled) for compiled in (False, True) for name in reversed(PRECISIONS))
"""Precisions of vLLM, and whether it compiles."""


def measure_sampling(size: Size, quick: bool, threads: int, note: Note) -> dict[str, Any]:
    """For each number of requests at a time the cost of all ways, and the machine's limit."""
    with ExitStack() as stack:
        policies = {name: make_policy(size, DTYPES[name]) for name in PRECISIONS}
        ways: dict[str, Sampler] = {}
        for name, policy in policies.items():
            engine = EmbeddedEngine(policy)
            stack.callback(lambda engine=engine: asyncio.run(engine.close()))
            ways[f"etude {name}"] = partial(measure_cost, embedded(asker(engine), iter(range(2**60))))
        note(f"{size.name}: the settings of generate")
        chosen = {"generate": _fastest_generate(size, policies, ways)}
        note(f"{size.name}: the settings of vLLM")
        vllm = stack.enter_context(_fastest_vllm(size, policies["float32"], quick, threads, note))
        if vllm is not None:
            chosen["vllm"], ways["vllm"] = vllm
        limit = _limits(size, policies[PRECISIONS[-1]])
        found = {
            str(at_once): _way_measured(size, ways, at_once, size.rounds[quick], limit, note)
            for at_once in size.concurrencies
        }
    return {"settings": chosen, "limit": limit, "at_a_time": found}


def _way_measured(
    size: Size, ways: dict[str, Sampler], at_once: int, count: int, limit: dict[str, float], note: Note
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


def _fastest_generate(size: Size, policies: dict[str, Policy], ways: dict[str, Sampler]) -> str:
    """The precision and cache that take the least at 8 requests; adds it to the ways."""
    prompts = random_prompts(random.Random(0), min(8, max(size.concurrencies)), size.prompt)
    found: list[tuple[float, str, Sampler]] = []
    for dtype, policy in policies.items():
        for cache in (None, "static"):
            way: Sampler = partial(measure_cost, generate(policy, cache))
            way(prompts, size.answer, len(prompts))
            found.append(
                (way(prompts, size.answer, len(prompts))[0], f"{dtype}, {cache or 'dynamic'} cache", way)
            )
    _, name, ways["generate"] = min(found, key=lambda one: one[0])
    return name


@contextmanager
def _fastest_vllm(
    size: Size, policy: Policy, quick: bool, threads: int, note: Note
) -> Iterator[tuple[str, Sampler] | None]:
    """vLLM in the precision that takes the least at 8 requests (quick: the first); None without one."""
    prompts = random_prompts(random.Random(0), min(8, max(size.concurrencies)), size.prompt)
    found: list[tuple[float, str, bool]] = []
    if PROGRAM not in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for dtype, compiled in () if quick else VLLM:
            note(f"{size.name}: vLLM in {dtype}{', compiled' * compiled}")
            with start_vllm(policy, Path(folder), dtype, compiled=compiled, threads=threads) as vllm:
                assert vllm is not None
                vllm.cost(prompts, size.answer, len(prompts))
                found.append((vllm.cost(prompts, size.answer, len(prompts))[0], dtype, compiled))
        _, dtype, compiled = min(found, default=(0.0, *VLLM[0]))
        with start_vllm(policy, Path(folder), dtype, compiled=compiled, threads=threads) as vllm:
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
    requests = [
        ChatRequest((), (), wanted, key, str(key), prompt=tuple(ids)) for key, ids in enumerate(prompts)
    ]
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


EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator"

_DEEP = replace(SMOLLM, initializer_range=0.0245)


@dataclass(frozen=True)
class Plan:
    """The length of a run, and its learning rates."""

    size: Size = _DEEP
    silent_from: int = 2
    """The layer from which on layers begin by adding nothing to the states."""
    is_careless: bool = False
    """Whether the base model imitates careless transcripts."""
    epochs: int = 16
    examples: int = 16
    """Of an epoch, with 8 episodes each."""
    held_out: int = 512
    learning_rate: float = 3e-5
    warm_up_rate: float = 7e-4
    max_grad_norm: float = 0.3
    """Of the warm-up."""
    warm_up_steps: int = 400
    """After which the base model counts as out of reach."""
    first_check: int = 80
    reward: float = 0.25
    """Of the base model, at least."""


_DEMO = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
SMALL = Plan(
    Size("demo", "llama", _DEMO, {}, initializer_range=0.06),
    is_careless=True,
    epochs=4,
    examples=16,
    held_out=64,
    learning_rate=7e-4,
    warm_up_rate=3e-3,
    max_grad_norm=1.0,
    warm_up_steps=600,
    first_check=100,
)
"""The demo's own model: whether it runs."""


def measure_run(folder: Path, plan: Plan, dtype: str, note: Note) -> dict[str, Any]:
    """Make the base model in an empty folder (or take the one that is there), and train it."""
    base = folder / "base"
    made: dict[str, Any] = {}
    if not (base / "model").is_dir():
        note("the base model of the run")
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("base", "runs"))
        shutil.copy(EXAMPLE.parent / "warm_up.py", folder)
        made = asyncio.run(_make_base(base, plan, dtype, note))
    note("etude train")
    return made | _train(folder, plan, dtype)


async def _make_base(base: Path, plan: Plan, dtype: str, note: Note) -> dict[str, Any]:
    sys.path.insert(0, str(base.parent))
    from agent import correct, solve  # type: ignore[import-not-found]
    from base import TRAINING, careless_transcript, transcript  # type: ignore[import-not-found]
    from task import calculator, draw_questions  # type: ignore[import-not-found]
    from warm_up import Stage, measure, warm_up, write_examples  # type: ignore[import-not-found]

    questions = draw_questions(TRAINING + plan.held_out, generator(0, "questions"))
    examples = [Example(f"question-{i}", {"question": q.text}, q.answer) for i, q in enumerate(questions)]
    write_examples(base / "train.jsonl", examples[:TRAINING])
    write_examples(base / "validation.jsonl", examples[TRAINING:])
    rng, tools = generator(0, "transcripts"), describe_tools([calculator])
    asked = questions[:TRAINING]
    shown = [careless_transcript(q, rng) if plan.is_careless else transcript(q) for q in asked]
    tokenizer = build_tokenizer(conversation_texts(shown, tools), splits=["[0-9+*]"])
    policy = make_policy(plan.size, DTYPES[dtype], tokenizer)
    with torch.no_grad():
        for layer in policy.model.model.layers[plan.silent_from :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    engine = EmbeddedEngine(policy, max_tokens=24)

    async def reward() -> float:
        return (await measure(solve, correct, engine, examples[:64], max_concurrency=64)).mean

    stage = Stage(
        "imitating an agent",
        shown,
        reward,
        at_least=plan.reward,
        tools=tools,
        options=LearnerOptions(
            learning_rate=plan.warm_up_rate,
            max_grad_norm=plan.max_grad_norm,
            schedule=Schedule(warmup_steps=20),
        ),
        batch_size=16,
        first_check=plan.first_check,
        max_steps=plan.warm_up_steps,
    )
    start, cpu = time.perf_counter(), time.process_time()
    try:
        (report,) = await warm_up(
            policy, [stage], seed=0, on_check=lambda name, value: note(f"{name}: {value:.3f}")
        )
    finally:
        await engine.close()
    policy.export(base / "model")
    return {
        "warm_up": {
            "steps": report.steps,
            "transcripts": report.steps * stage.batch_size,
            "reward": report.value,
            "minutes": round((time.perf_counter() - start) / 60, 2),
            "cpu_minutes": round((time.process_time() - cpu) / 60, 2),
        }
    }


def _train(folder: Path, plan: Plan, dtype: str) -> dict[str, Any]:
    """`etude train` in a process of its own, and what it printed."""
    overrides = {
        "llms.policy.dtype": dtype,
        "trajectory_builders.grpo.examples_per_epoch": plan.examples,
        "trainer_adapters.local.learning_rate": plan.learning_rate,
        "finetuning.num_epochs": plan.epochs,
        "finetuning.run_configuration.validation_interval": plan.epochs,
        "finetuning.output_dir": json.dumps(str(folder / "runs")),
    }
    options = [part for name, value in overrides.items() for part in ("-o", f"{name}={value}")]
    command = [sys.executable, "-m", "etude", "train", str(folder / "config.yml"), "--json", *options]
    start = time.perf_counter()
    events = list(run(command, start))
    trained = [event for event in events if event["event"] == "trained"]
    last = events[-1]
    mismatch = [event["metrics"]["training"]["mismatch_kl"] for event in trained]
    return {
        "dtype": dtype,
        "learning_rate": plan.learning_rate,
        "episodes": sum(event["metrics"]["episodes"] for event in trained),
        "before": _reward(last["before"]),
        "after": _reward(last["after"]),
        "minutes": round(last["at"] / 60, 2),
        "cpu_minutes": None if trained[-1]["cpu"] is None else round(trained[-1]["cpu"] / 60, 2),
        "mismatch_kl": {"mean": statistics.fmean(mismatch), "most": max(mismatch)},
        "curve": [
            {"minutes": round(event["at"] / 60, 2), "reward": event["metrics"]["avg_reward"]}
            for event in trained
        ],
    }


def _reward(found: dict[str, Any]) -> dict[str, Any]:
    """On held-out examples, with its 95 % interval."""
    return {
        "mean": found["avg_reward"],
        "low": found["reward_low"],
        "high": found["reward_high"],
        "n": found["n"],
    }


GOALS = {
    "step_speedup_bf16": 3.0,
    "ratio_vs_trl.turns": 8.0,
    "ratio_vs_generate.8": 2.0,
    "ratio_vs_vllm.1": 1.0,
    "ratio_vs_vllm.8": 1.0,
    "ratio_vs_vllm.32": 1.0,
    "share_of_limit.step": 0.35,
}
"""At least, with SmolLM2's shape. `mismatch_kl` is to be 1e-3 at most."""


def measure(flags: argparse.Namespace, sizes: Sequence[Size], note: Note) -> dict[str, Any]:
    """Each part that was asked for, by the names of models."""
    found: dict[str, Any] = {}
    of_size: dict[str, Callable[[Size], Any]] = {
        "step": lambda size: measure_steps(size, flags.quick, note),
        "sampling": lambda size: measure_sampling(size, flags.quick, flags.threads, note),
        "mismatch": lambda size: mismatch(make_policy(size, DTYPES["bfloat16"]), size.prompt, size.answer),
    }
    for part in flags.only:
        if part != "run":
            found[part] = {size.name: of_size[part](size) for size in sizes}
            continue
        plan = SMALL if flags.look else Plan()
        with tempfile.TemporaryDirectory() as folder:
            found[part] = measure_run(flags.folder or Path(folder), plan, flags.dtype, note)
    return found


def as_json(parts: dict[str, Any], first: str, threads: int) -> dict[str, Any]:
    """The object that `--json` prints; the ratios are those of the model `first`, in CPU time."""
    found: dict[str, Any] = {"threads": threads, "versions": versions()}
    if "step" in parts:
        shapes = parts["step"][first]
        speedup = shapes["turns"]["speedup_bf16"]
        found["step_speedup_bf16"] = None if speedup is None else speedup["cpu"]["median"]
        found["ratio_vs_trl"] = {name: row["vs_trl"]["cpu"]["median"] for name, row in shapes.items()}
        found.setdefault("share_of_limit", {})["step"] = shapes["turns"]["share_of_limit"]
    if "sampling" in parts:
        rows = parts["sampling"][first]["at_a_time"]
        for peer in PEERS:
            found[f"ratio_vs_{peer}"] = {
                name: row[f"vs_{peer}"]["cpu"]["median"] if f"vs_{peer}" in row else None
                for name, row in rows.items()
            }
        shares = {name: row["share_of_limit"] for name, row in rows.items()}
        found.setdefault("share_of_limit", {})["decode"] = shares
    if "mismatch" in parts:
        found["mismatch_kl"] = parts["mismatch"][first]["kl"]
    return found | {"parts": parts}


def versions() -> dict[str, str]:
    """Of what was measured."""
    return {name: version(name) for name in ("torch", "transformers", "trl")}


def print_results(found: dict[str, Any]) -> None:
    """A table of each part."""
    parts = found["parts"]
    notes = [
        f"{found['threads']} threads",
        ", ".join(f"{name} {one}" for name, one in found["versions"].items()),
    ]
    if "step" in parts:
        columns = [
            "",
            "tokens",
            *(f"{name} s" for name in PRECISIONS),
            "step s",
            "TRL s",
            "x TRL",
            "bf16 x f32",
            "of limit",
        ]
        print_table(
            f"CPU seconds of a gradient, and of a whole step in {PRECISIONS[-1]}",
            columns,
            _steps(parts["step"]),
            notes,
        )
    if "sampling" in parts:
        ways = [*(f"etude {name}" for name in PRECISIONS), *PEERS]
        columns = ["", *ways, *(f"x {peer}" for peer in PEERS), "of limit"]
        print_table("Tokens sampled in a CPU second", columns, _sampled(parts["sampling"], ways), notes)
    for name, one in parts.get("mismatch", {}).items():
        differ = f"engine and learner differ by {one['kl']:.2g} nats a token"
        print(f"{name}, bfloat16: {differ} (n={one['tokens']:.0f})")
    if "run" in parts:
        run = parts["run"]
        told = [f"{run[when]['mean']:.3f} [{run[when]['low']:.3f}, {run[when]['high']:.3f}]" for when in WHEN]
        row = ["calculator", *told, str(run["episodes"]), f"{run['minutes']:.1f}"]
        print_table("The run", ["", *WHEN, "episodes", "minutes"], [row], notes)


WHEN = ("before", "after")


def _steps(sizes: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{size}, {shape}",
            f"{row['distinct_tokens']} of {row['tokens']}",
            *(f"{row['cpu_s'][way]:.2f}" for way in (*PRECISIONS, f"{PRECISIONS[-1]} step", "trl")),
            _shown(row["vs_trl"]),
            _shown(row["speedup_bf16"]),
            f"{row['share_of_limit']:.0%}",
        ]
        for size, shapes in sizes.items()
        for shape, row in shapes.items()
    ]


def _sampled(sizes: dict[str, Any], ways: Sequence[str]) -> list[list[str]]:
    return [
        [
            f"{size}, {at_once}",
            *(str(row["tokens_per_cpu_s"].get(way, "-")) for way in ways),
            *(_shown(row.get(f"vs_{peer}")) for peer in PEERS),
            f"{row['share_of_limit']:.0%} ({row['limited_by']})",
        ]
        for size, measured in sizes.items()
        for at_once, row in measured["at_a_time"].items()
    ]


def _shown(ratio: dict[str, Any] | None) -> str:
    """The median of a ratio, and its range."""
    if ratio is None:
        return "-"
    cpu = ratio["cpu"]
    return f"{cpu['median']:.2f} [{cpu['low']:.2f}, {cpu['high']:.2f}]"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes, and no run")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--model", choices=[SMOLLM.name, QWEN.name], action="append", help="this shape alone")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of vLLM")
    parser.add_argument("--dtype", choices=[*DTYPES], default=PRECISIONS[-1], help="of the run")
    parser.add_argument("--folder", type=Path, help="where the run is, and its base model stays")
    parser.add_argument("--look", action="store_true", help="everything small: whether it runs")
    flags = parser.parse_args(arguments)
    flags.only = flags.only or [part for part in PARTS if part != "run" or not flags.quick]
    return flags


PARTS = ("step", "sampling", "mismatch", "run")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables or JSON."""
    flags = parsed(arguments)
    torch.set_num_threads(flags.threads)
    wanted = flags.model or [SMOLLM.name] + [QWEN.name] * (not flags.quick)
    sizes = [LOOK] if flags.look else [size for size in (SMOLLM, QWEN) if size.name in wanted]
    found = as_json(measure(flags, sizes, silent if flags.json else progress), sizes[0].name, flags.threads)
    if flags.json:
        print_json(found)
    else:
        print_results(found)


def wait_quietly() -> None:
    """Start this program again, unless its threads and those of its peers wait without spinning already.

    OpenMP's threads spin by default. Beside other work two of them took nine times the CPU time of one for
    the same products, and fourteen times as long; with `passive` 1.2 times, and no longer than one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    wait_quietly()
    main()
