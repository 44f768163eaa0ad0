"""The gradient of a step of a run, by the precision of the learner, with and without `correction`.

    python benchmarks/precision.py runs/larger --version 20

The samples are those that the run's engine drew from that version, with the logprobs that it recorded; the
run must have kept the version. The truth is the gradient of a learner in float32 whose ratios are exactly 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import print_json, print_table

import etude
from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import branches_in, sample_of
from etude.core.sample import Sample
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.packed import logprobs_of
from etude.models.device import dtype_name
from etude.models.policy import Policy
from etude.store.learned import ids_digest, read_learned

WAYS = {
    "ratio to the engine": Grpo(correction="none"),
    "correction: truncate": Grpo(correction="truncate"),
}


@dataclass(frozen=True)
class Found:
    """One gradient beside the true one."""

    learner: str
    way: str
    cosine: float
    length: float
    """Relative to that of the truth."""
    clipped: float
    """Share of the tokens whose gradient is cut off."""
    mismatch: float
    """Nats a token by which the learner differs from the engine: `mismatch_kl`."""


def samples_of(run: etude.Run, version: int) -> list[Sample]:
    """Those that the job after `version` took, with their advantages."""
    samples = []
    for record in run.episodes.of(f"train/{version + 1}"):
        learned = {one.digest: one for one in read_learned(run.folder, record.id, version=version + 1)}
        for branch in branches_in(record.calls):
            sample = sample_of(branch, record, reward=0.0)
            if (own := learned.get(ids_digest(sample.ids))) is not None:
                samples.append(replace(sample, advantages=own.advantages, reward=own.reward))
    return samples


def gradient(policy: Policy, samples: Sequence[Sample], algorithm: Grpo) -> tuple[torch.Tensor, Any]:
    """All of it as one vector, and the metrics of the loss."""
    learner = Learner(policy, LearnerOptions())
    metrics, _ = learner.add_gradient([(sample,) for sample in samples], algorithm)
    found = [one.grad.flatten().double() for one in learner.optimiser.gradients if one.grad is not None]
    learner.optimiser.drop_gradient()
    return torch.cat(found), metrics


def measure(run: etude.Run, version: int, most: int) -> list[Found]:
    """All ways beside the truth."""
    samples = samples_of(run, version)[:most]
    own, exact = (run.version(str(version)).load() for _ in range(2))
    exact.model.float()
    name = dtype_name(next(own.model.parameters()).dtype)
    logprobs = logprobs_of(exact, samples)
    on_policy = [replace(one, logprobs=tuple(row)) for one, row in zip(samples, logprobs, strict=True)]
    truth, _ = gradient(exact, on_policy, Grpo())
    found = []
    for way, algorithm in WAYS.items():
        for learner, policy in {"float32": exact, name: own}.items():
            vector, metrics = gradient(policy, samples, algorithm)
            cosine = float(vector @ truth / (vector.norm() * truth.norm()))
            share = float(vector.norm() / truth.norm())
            found.append(Found(learner, way, cosine, share, metrics["clip_fraction"], metrics["sampled_kl"]))
    return found


def main() -> None:
    """Measure one version, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run with the backend `local`")
    parser.add_argument("--version", type=int, required=True, help="whose samples; the run must have kept it")
    parser.add_argument("--samples", type=int, default=128, help="at most as many (128)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    flags = parser.parse_args()
    found = measure(etude.load_run(flags.run), flags.version, flags.samples)
    if flags.json:
        print_json({"found": [asdict(one) for one in found]})
        return
    rows = [
        [
            f"{one.learner}, {one.way}",
            f"{one.cosine:.4f}",
            f"{one.length:.2f}",
            f"{one.clipped:.2%}",
            f"{one.mismatch:.2g}",
        ]
        for one in found
    ]
    columns = ["learner", "cosine", "length", "clipped", "mismatch_kl"]
    print_table(f"The gradient on the samples of version {flags.version}", columns, rows, [])


if __name__ == "__main__":
    main()
