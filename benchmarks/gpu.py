"""The learner and the embedded engine on one GPU, with a model of half a billion parameters.

A Qwen2 with random weights in bfloat16; GRPO steps on 8 prompts x 8 completions of 512, on a prompt of 8192
x 8 completions of 512, and on 8 conversations of 6 turns up to 8k tokens, by token trees, padded and by TRL;
and sampling at 1, 8 and 64 requests. Times are wall times between waits for the device, in medians; the
share of the matrix rate is that of a large product measured in the same run. It needs what the extra `local`
installs; TRL is left out where it is not there. `--small` is a look at the whole on a CPU: its figures say
nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from common import parse_arguments, print_json, print_table, progress
from engine import Sample as Sampler
from engine import asker, continuous, embedded, generate, measure_cost, random_prompts
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from etude.algorithms.grpo import Grpo
from etude.core.sample import Sample
from etude.engines.embedded import EmbeddedEngine
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.tree import token_tree
from etude.models.policy import Policy
from etude.models.tiny import build_tokenizer
from learner import conversations, groups, peak_mb, steps

Shape = Callable[[random.Random], list[Sample]]


@dataclass(frozen=True)
class Scale:
    """All sizes."""

    name: str
    model: dict[str, Any]
    """Of a Qwen2."""
    shapes: dict[str, Shape]
    budgets: tuple[int, ...]
    """Tokens at a time, of which the fastest counts."""
    rows: tuple[int, ...]
    """Rows at a time, for TRL."""
    matrix: int
    """Side of the matrices that the rate is measured with."""
    prompt: int
    answer: int
    concurrencies: tuple[int, ...] = (1, 8, 64)
    pages: dict[str, int] = field(default_factory=dict)
    """Of continuous batching."""


FULL = Scale(
    name="0.5B",
    model={
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    shapes={
        "short": lambda choose: groups(choose, 8, prompt=(192, 320), completion=(384, 640)),
        "long": lambda choose: groups(choose, 1, prompt=(8192, 8192), completion=(512, 512)),
        "turns": lambda choose: conversations(choose, prompt=1024, answer=(384, 640), told=(512, 768)),
    },
    budgets=(16384, 32768, 65536),
    rows=(8, 2),
    matrix=8192,
    prompt=256,
    answer=128,
    pages={"page_size": 256, "num_blocks": 512, "max_batch_tokens": 8192},
)
SMALL = Scale(
    name="small",
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    shapes={
        "short": lambda choose: groups(choose, 2, prompt=(12, 20), completion=(4, 12)),
        "long": lambda choose: groups(choose, 1, prompt=(128, 128), completion=(8, 8)),
        "turns": lambda choose: conversations(choose, prompt=32, answer=(4, 8), told=(4, 8)),
    },
    budgets=(2048,),
    rows=(8,),
    matrix=256,
    prompt=16,
    answer=4,
    concurrencies=(1, 2),
    pages={"page_size": 32, "num_blocks": 64, "max_batch_tokens": 64},
)


def make_policy(scale: Scale, device: torch.device, dtype: torch.dtype, **changes: Any) -> Policy:
    """A Qwen2 with random weights, that never stops by itself."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = build_tokenizer(["what is 1 plus 2? it is 3."], vocab_size=512)
    config = Qwen2Config(
        **(scale.model | changes),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    policy = Policy(model, tokenizer, scale.name, device)
    policy.stop_ids = frozenset()
    return policy


@dataclass(frozen=True)
class Work:
    """The work of a step, without any padding."""

    tokens: int
    choices: int
    """Tokens that are trained on."""
    looks: int
    """Pairs of a token and one that it looks at."""

    def flops(self, policy: Policy) -> float:
        """Multiplications and additions of matrices: once forward, twice for the gradient."""
        config = policy.model.config
        weights = sum(one.numel() for one in policy.model.model.layers.parameters() if one.dim() == 2)
        heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
        head = config.vocab_size * config.hidden_size * self.choices
        attention = 2 * heads * config.num_hidden_layers * self.looks
        return 6.0 * (weights * self.tokens + head + attention)


def count_work(sequences: Sequence[Sample], *, tree: bool) -> Work:
    """Of sequences by themselves, or as a token tree."""
    choices = sum(sum(map(bool, one.loss_weights)) for one in sequences)
    if not tree:
        lengths = [len(one.ids) for one in sequences]
        return Work(sum(lengths), choices, sum(size * (size + 1) // 2 for size in lengths))
    made = token_tree([one.ids for one in sequences])
    return Work(len(made), choices, int(np.sum(made.depths + 1)))


Step = Callable[[], Any]


def wait(device: torch.device) -> None:
    """Until all that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, device: torch.device) -> float:
    """Of one step."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def median_seconds(steps: dict[str, Step], repeats: int, device: torch.device) -> dict[str, float]:
    """Medians of steps that take turns, and have been warmed up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            found[name].append(seconds(step, device))
    return {name: statistics.median(values) for name, values in found.items()}


def fastest(candidates: dict[str, Step], device: torch.device) -> tuple[str, Step] | None:
    """The one that takes the least, by the better of two tries after a first; None where all lack memory."""
    found: list[tuple[float, str, Step]] = []
    for name, step in candidates.items():
        # Not where memory is lacking: the error still holds what the step had made.
        torch.cuda.empty_cache()
        try:
            step()
            found.append((min(seconds(step, device) for _ in range(2)), name, step))
        except torch.OutOfMemoryError:
            continue
    if not found:
        return None
    _, name, step = min(found, key=lambda one: one[0])
    return name, step


def peak_megabytes(step: Step, device: torch.device) -> float:
    """The most memory that torch held during a step, beyond what it held before."""
    if device.type != "cuda":
        return peak_mb(step)
    wait(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def matrix_rate(size: int, device: torch.device) -> float:
    """Multiplications and additions a second of a product of two random matrices in bfloat16."""
    made = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(size, size, device=device, generator=made).to(torch.bfloat16) for _ in range(2))
    for _ in range(3):
        one @ other
    found = statistics.median(seconds(lambda: [one @ other for _ in range(10)], device) for _ in range(5))
    return 10 * 2 * size**3 / found


def copy_rate(size: int, device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device, of eight matrices in float32."""
    here = torch.randn(8 * size * size, device=device)
    there = torch.empty_like(here)
    there.copy_(here)
    found = statistics.median(seconds(lambda: there.copy_(here), device) for _ in range(5))
    return 2 * here.numel() * here.itemsize / found


def top_kernels(step: Step, device: torch.device, count: int = 20) -> list[dict[str, Any]]:
    """Shares of a step's time on the device (on a CPU, of its time on that), the largest first."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # The engine's thread is another than this one.
    threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=threads) as profiler:
        step()
        wait(device)
    events = [
        (one.self_device_time_total if on_gpu else one.self_cpu_time_total, one.count, one.key)
        for one in profiler.key_averages()
        # What was asked for on the CPU has the time of its kernels too.
        if not on_gpu or one.device_type == torch.autograd.DeviceType.CUDA
    ]
    whole = sum(time for time, _, _ in events) or 1.0
    return [
        {"kernel": name[:120], "ms": round(time / 1000, 3), "share": round(time / whole, 4), "calls": calls}
        for time, calls, name in sorted(events, reverse=True)[:count]
    ]


Note = Callable[[str], None]


@dataclass
class Cost:
    """The cost of a step by each way."""

    shape: str
    work: dict[str, Work]
    """Of a tree, and of sequences by themselves."""
    seconds: dict[str, float] = field(default_factory=dict)
    mb: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    """The fastest setting of each way."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Ways that were not measured, and why."""
    gradient_difference: float | None = None
    """Between tree and padding in bfloat16: the norm of the difference, relative to that of padding."""

    def as_json(self, policy: Policy, rate: float) -> dict[str, Any]:
        """Its part of the JSON; `rate` is that of the matrix product."""
        own = {way: "tree" if way in ("tree", "step") else "padded" for way in self.seconds}
        tokens = self.work["padded"].tokens
        flops = {kind: work.flops(policy) for kind, work in self.work.items()}
        return {
            "shape": self.shape,
            "tokens": tokens,
            "distinct_tokens": self.work["tree"].tokens,
            "ms": {way: round(time * 1000, 2) for way, time in self.seconds.items()},
            "tokens_per_s": {way: round(tokens / time) for way, time in self.seconds.items()},
            "matrix_share": {
                way: round(flops[own[way]] / time / rate, 4) for way, time in self.seconds.items()
            },
            "peak_mb": {way: round(value, 1) for way, value in self.mb.items()},
            "chosen": self.chosen,
            "left_out": self.left_out,
            "ratio_vs_padded": self._ratio("padded"),
            "ratio_vs_trl": self._ratio("trl"),
            "gradient_difference": self.gradient_difference,
        }

    def _ratio(self, peer: str) -> float | None:
        there = peer in self.seconds and "tree" in self.seconds
        return round(self.seconds[peer] / self.seconds["tree"], 2) if there else None


class Way:
    """Loss and gradient by Etude's learner, with one packing and token budget."""

    def __init__(self, policy: Policy, units: Sequence[Any], packing: str, budget: int) -> None:
        options = LearnerOptions(packing=packing, token_budget=budget, learning_rate=1e-6)  # type: ignore[arg-type]
        self.learner = Learner(policy, options)
        self._units = units

    def __call__(self) -> None:
        try:
            self._add()
        finally:  # Where memory was too little, the next one is to have all of it.
            self.learner.optimiser.drop_gradient()

    def whole(self) -> None:
        """The same, and what an optimiser step has beside it."""
        self.learner.take_step(self._units, Grpo())

    def gradient(self) -> torch.Tensor:
        """All of it, as one vector in float32."""
        self._add()
        masters = self.learner.optimiser.masters.values()
        found = [one.grad.flatten().float() for one in masters if one.grad is not None]
        self.learner.optimiser.drop_gradient()
        return torch.cat(found)

    def _add(self) -> None:
        self.learner.optimiser.drop_gradient()
        self.learner.add_gradient(self._units, Grpo())


def measure_learner(policy: Policy, scale: Scale, repeats: int, note: Note) -> list[Cost]:
    """All shapes; `note` is told what is measured next."""
    return [_measured(policy, scale, shape, repeats, note) for shape in scale.shapes]


def _measured(policy: Policy, scale: Scale, shape: str, repeats: int, note: Note) -> Cost:
    sequences = scale.shapes[shape](random.Random(0))
    units = [(one,) for one in sequences]
    cost = Cost(
        shape, {"tree": count_work(sequences, tree=True), "padded": count_work(sequences, tree=False)}
    )
    chosen: dict[str, Step] = {}
    for way, packing in (("tree", "tree"), ("padded", "padded")):
        note(f"{scale.name}, {shape}, {way}")
        ways = {str(budget): Way(policy, units, packing, budget) for budget in scale.budgets}
        _choose(cost, chosen, way, ways, policy.device)
        notes = [one.learner.note for one in ways.values() if one.learner.note]
        if notes:
            cost.left_out[way] = notes[0]
    note(f"{scale.name}, {shape}, TRL")
    _choose_trl(cost, chosen, policy, sequences, scale)
    note(f"{scale.name}, {shape}, all")
    tree, padded = chosen.get("tree"), chosen.get("padded")
    if isinstance(tree, Way) and isinstance(padded, Way):
        cost.gradient_difference = _difference(tree, padded)
    if isinstance(tree, Way):
        _choose(cost, chosen, "step", {cost.chosen["tree"]: tree.whole}, policy.device)
    cost.seconds = median_seconds(chosen, repeats, policy.device)
    for name, step in chosen.items():
        if name == "trl":
            # What the last step left is not to be of use to the next.
            step.model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        cost.mb[name] = peak_megabytes(step, policy.device)
        note(f"… {name}: {cost.seconds[name] * 1000:.1f} ms, {cost.mb[name]:.0f} MB")
    return cost


def _choose(
    cost: Cost, chosen: dict[str, Step], way: str, candidates: dict[str, Any], device: torch.device
) -> None:
    found = fastest(candidates, device)
    if found is None:
        cost.left_out[way] = "the device's memory does not hold it"
        return
    cost.chosen[way], chosen[way] = found


def _choose_trl(
    cost: Cost, chosen: dict[str, Step], policy: Policy, sequences: Sequence[Sample], scale: Scale
) -> None:
    if importlib.util.find_spec("trl") is None:
        cost.left_out["trl"] = "trl is not installed"
        return
    try:
        candidates = steps("grpo", policy, sequences, scale.rows)
        _choose(cost, chosen, "trl", candidates, policy.device)
    except Exception as error:  # noqa: BLE001  whatever it breaks by, the rest is to be measured
        cost.left_out["trl"] = f"{type(error).__name__}: {error}"


def _difference(tree: Way, padded: Way) -> float:
    one, other = tree.gradient(), padded.gradient()
    return float(f"{float((one - other).norm() / other.norm()):.3g}")


def exactness(scale: Scale, device: torch.device) -> dict[str, Any]:
    """The gradient of trees against padding in float32, on a model of two layers of the same width.

    The largest difference, relative to the largest number; and why trees were padded, if they were.
    """
    policy = make_policy(scale, device, torch.float32, num_hidden_layers=2, vocab_size=512)
    sequences = scale.shapes["turns"](random.Random(0))[: 12 if scale is FULL else None]
    units = [(one,) for one in sequences]
    tree, padded = (Way(policy, units, packing, 16384) for packing in ("tree", "padded"))
    one, other = tree.gradient(), padded.gradient()
    found = float((one - other).abs().max() / other.abs().max())
    return {"max_relative_gradient_error_float32": found, "note": tree.learner.note}


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


def measure_sampling(policy: Policy, scale: Scale, repeats: int, note: Note) -> list[Rates]:
    """All concurrencies; each way by the best of some tries after a first, as a try of it takes seconds."""
    engine = EmbeddedEngine(policy)
    ways: dict[str, Callable[[], Sampler]] = {
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


def _rate(sample: Sampler, scale: Scale, concurrency: int, repeats: int) -> float:
    choose = random.Random(concurrency)
    walls = []
    for number in range(repeats + 1):
        prompts = random_prompts(choose, concurrency, scale.prompt)
        _, wall = measure_cost(sample, prompts, scale.answer, concurrency)
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


FLAGS = {
    "small": "everything small, on the CPU: whether it runs",
    "profile": "also list the kernels that take longest",
    "learner": "the learner alone",
    "sampling": "sampling alone",
}


def measure(scale: Scale, device: torch.device, arguments: Any, note: Any) -> dict[str, Any]:
    """The object that `--json` prints."""
    both = arguments.learner == arguments.sampling
    repeats = 3 if arguments.quick or scale is SMALL else 7
    note("the machine")
    rate = matrix_rate(scale.matrix, device)
    found: dict[str, Any] = {
        "machine": machine(device)
        | {
            "matrix_tflops_per_s": round(rate / 1e12, 3),
            "copy_gb_per_s": round(copy_rate(scale.matrix, device) / 1e9, 1),
        },
        "model": scale.name,
    }
    if both or arguments.learner:
        note("exactness")
        found["exactness"] = exactness(scale, device)
    policy = make_policy(scale, device, torch.bfloat16)
    if both or arguments.learner:
        costs = measure_learner(policy, scale, repeats, note)
        rows = [one.as_json(policy, rate) for one in costs]
        for peer in ("padded", "trl"):
            found[f"ratio_vs_{peer}"] = {row["shape"]: row[f"ratio_vs_{peer}"] for row in rows}
        found["learner"] = rows
    if both or arguments.sampling:
        found["sampling"] = [one.as_json() for one in measure_sampling(policy, scale, min(repeats, 3), note)]
    if arguments.profile:
        note("profiles")
        found["profile"] = profiles(policy, scale, both or arguments.learner, both or arguments.sampling)
    return found


def profiles(policy: Any, scale: Scale, learner: bool, sampling: bool) -> dict[str, Any]:
    """The kernels that take longest: in a step of each shape, and in sampling."""
    found = {}
    for shape, make in scale.shapes.items() if learner else ():
        units = [(one,) for one in make(random.Random(0))]
        way = Way(policy, units, "tree", scale.budgets[0])
        way.whole()
        found[shape] = top_kernels(way.whole, policy.device)
    if sampling:
        found["sampling"] = kernels(policy, scale)
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """The device and the releases that it was measured with."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if on_gpu
        else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in ("torch", "transformers", "trl", "triton")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def print_results(found: dict[str, Any]) -> None:
    """Tables of what was measured."""
    rate = found["machine"]["matrix_tflops_per_s"]
    notes = [f"{name}: {value}" for name, value in found["machine"].items() if value is not None]
    if "learner" in found:
        exactness = found["exactness"]
        told = [
            f"share: of {rate} TFLOP/s",
            "gradients of tree and padding differ by "
            f"{exactness['max_relative_gradient_error_float32']:.1g} of the largest number in float32",
        ]
        print_table(*_learner_table(found), [*told, exactness["note"] or "", *_left_out(found["learner"])])
    if "sampling" in found:
        print_table(*_sampling_table(found), _left_out(found["sampling"]))
    for name, kernels in found.get("profile", {}).items():
        rows = [
            [one["kernel"], f"{one['ms']:.2f}", f"{one['share']:.1%}", str(one["calls"])] for one in kernels
        ]
        print_table(f"Kernels: {name}", ["", "ms", "share", "calls"], rows, [])
    print("\n".join(notes))


def _learner_table(found: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for row in found["learner"]:
        for way, ms in row["ms"].items():
            rows.append(
                [
                    f"{row['shape']}, {way} {row['chosen'].get(way, '')}",
                    f"{row['distinct_tokens']} of {row['tokens']}",
                    f"{ms:.1f}",
                    str(row["tokens_per_s"][way]),
                    f"{row['matrix_share'][way]:.1%}",
                    f"{row['peak_mb'][way]:.0f}",
                    f"{ms / row['ms']['tree']:.2f}" if "tree" in row["ms"] else "-",
                ]
            )
    title = f"GRPO, {found['model']}, bfloat16"
    return title, ["", "tokens", "ms", "tokens/s", "share", "MB", "x tree"], rows


def _sampling_table(found: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    ways = list(dict.fromkeys(way for row in found["sampling"] for way in row["tokens_per_s"]))
    rows = [
        [str(row["concurrency"]), *(str(row["tokens_per_s"].get(way, "-")) for way in ways)]
        for row in found["sampling"]
    ]
    return "Tokens sampled a second, with logprobs", ["at a time", *ways], rows


def _left_out(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{way}: {why}" for row in rows for way, why in row["left_out"].items()]


def main() -> None:
    """Measure, and print tables or JSON."""
    arguments = parse_arguments(__doc__ or "", None, **FLAGS)
    if not arguments.small and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; try `--small` for a look at what this does")
    if arguments.small:
        torch.set_num_threads(1)
    scale, device = (SMALL, torch.device("cpu")) if arguments.small else (FULL, torch.device("cuda"))
    # On standard error with `--json` too: a run that is stopped half-way has shown half of the figures.
    found = measure(scale, device, arguments, progress)
    if arguments.json:
        print_json(found)
    else:
        print_results(found)


if __name__ == "__main__":
    main()
