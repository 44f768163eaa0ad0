"""Models of real size with random weights, sequences for them, and the limits of the machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_model import FULL, SMALL
from learner_data import conversations, groups, long, short

from etude.core.sample import Sample
from etude.models.device import multiplies_bfloat16
from etude.models.policy import Policy
from etude.models.tiny import build_tokenizer

Cost = tuple[float, float]
"""CPU and wall seconds."""
Note = Callable[[str], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS = tuple(DTYPES) if multiplies_bfloat16() else ("float32",)
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


def policy_of(size: Size, dtype: torch.dtype, tokenizer: Any = None) -> Policy:
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
