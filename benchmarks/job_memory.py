"""Peak memory of real training jobs, beside what they are estimated to take before they start.

    python benchmarks/job_memory.py [--quick] [--json]

Llamas with random weights, up to the shape of SmolLM2-135M, each job in a process of its own: two optimiser
steps on the CPU in float32, those of GRPO on token trees, of which all goes through the model at a time, and
a checkpoint after the last. The peak is that of the resident memory above what a process has that has
trained a model of a layer before.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from common import parse_arguments, print_json, print_table, progress, silent


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    width: int
    layers: int
    heads: int
    keys: int
    """Heads of keys and values."""
    inner: int
    vocabulary: int


SHAPES = {
    "4 M": Shape(192, 6, 6, 6, 512, 2048),
    "25 M": Shape(384, 10, 6, 2, 1024, 16384),
    "135 M": Shape(576, 30, 9, 3, 1536, 49152),
}
METHODS = ("supervised", "dpo", "grpo")
BATCHES = ((4, 64), (2, 256), (8, 128))
"""Sequences of a step and their length."""
WAYS = ("full", "lora", "checkpointed")


NAMES = ("shape", "method", "way", "sequences", "length")


def cases() -> list[tuple[str, str, str, int, int]]:
    """Shape, method, way, sequences and length: every shape with every method and way, but one batch each."""
    chosen: list[tuple[str, str, str, int, int]] = []
    for row, shape in enumerate(SHAPES):
        for column, method in enumerate(METHODS):
            for number, way in enumerate(WAYS):
                chosen.append((shape, method, way, *BATCHES[(row + column + number) % len(BATCHES)]))
    return chosen


def measure(name: str, method: str, way: str, sequences: int, length: int) -> dict[str, Any]:
    """The peak of a job and its estimate, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = _status("VmRSS")
    estimate = train(SHAPES[name], method, way, sequences, length)
    peak = _status("VmHWM") - before
    return {"peak": peak, "estimate": estimate.total, "ratio": estimate.total / peak, "parts": str(estimate)}


def train(shape: Shape, method: str, way: str, sequences: int, length: int) -> Any:
    """Train a job of two steps; the memory that it was estimated to take."""
    from etude.algorithms.algorithm import make_algorithm
    from etude.backends.job_training import JobData, JobListener, JobTraining
    from etude.backends.state_folders import StateFolders
    from etude.learner.learner import Learner, LearnerOptions
    from etude.learner.memory import ModelNumbers
    from etude.models.policy import LoraOptions

    algorithm = make_algorithm(method, {} if method == "supervised" else {"beta": 0.1})
    units = _units(method, sequences, length, shape.vocabulary)
    policy, checkpointed = _policy(shape), way == "checkpointed"
    if way == "lora":
        policy.use_lora(LoraOptions(16, 32.0), seed=0)
    if "reference" in algorithm.needs():
        policy.keep_base()
    learner = Learner(policy, LearnerOptions(gradient_checkpointing=checkpointed))
    data = JobData(algorithm, [units], passes=2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = StateFolders(Path(folder), "step-", "checkpoint")
        JobTraining(learner, data, JobListener(), checkpoints, 2).run(Event())
    reference = "reference" in algorithm.needs()
    return ModelNumbers.of(policy).training(
        *learner.largest_pass(units), on_gpu=False, checkpointed=checkpointed, reference=reference
    )


def _units(method: str, sequences: int, length: int, vocabulary: int) -> list[Any]:
    """Random tokens, of which the second half is learned; a group of GRPO's has the first in common."""
    from etude.core.sample import Sample

    asked, draw = length // 2, random.Random(0)
    question = tuple(draw.randrange(vocabulary) for _ in range(asked))
    answered = length - asked

    def sample(advantage: float) -> Sample:
        ids = tuple(draw.randrange(vocabulary) for _ in range(length))
        values: dict[str, Any] = {}
        if method == "grpo":
            ids = question + ids[asked:]
            values["logprobs"] = (0.0,) * asked + (-5.0,) * answered
            values["advantages"] = (0.0,) * asked + (advantage,) * answered
        return Sample(ids, (False,) * asked + (True,) * answered, **values)

    samples = [sample(1.0 - 2.0 * (number % 2)) for number in range(sequences)]
    size = 2 if method == "dpo" else 1
    return [tuple(samples[at : at + size]) for at in range(0, sequences, size)]


def _policy(shape: Shape) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from etude.models.device import limit_threads
    from etude.models.policy import Policy
    from etude.models.tiny import build_tokenizer

    limit_threads()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    return Policy(model, build_tokenizer(["1 plus 2 is 3."], vocab_size=300), "tiny", torch.device("cpu"))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    flags = parse_arguments(str(__doc__), arguments)
    note = silent if flags.json else progress
    rows: list[dict[str, Any]] = []
    train(Shape(64, 1, 2, 2, 128, 512), "grpo", "lora", 2, 32)
    for case in cases()[: 3 if flags.quick else None]:
        note(", ".join(map(str, case)))
        with multiprocessing.get_context("fork").Pool(1) as pool:
            rows.append(dict(zip(NAMES, case, strict=True)) | pool.apply(measure, case))
    ratios = sorted(row["ratio"] for row in rows)
    if flags.json:
        print_json({"rows": rows, "median": median(ratios), "least": ratios[0], "most": ratios[-1]})
        return
    print_table(
        "Peak memory of a job and its estimate, in MB",
        ("model", "method", "way", "tokens", "peak", "estimate", "estimate / peak"),
        [
            [
                row["shape"],
                row["method"],
                row["way"],
                f"{row['sequences']} x {row['length']}",
                f"{row['peak'] / 1e6:.0f}",
                f"{row['estimate'] / 1e6:.0f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
        [f"estimate / peak: {median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}], n = {len(ratios)}"],
    )


if __name__ == "__main__":
    main()
