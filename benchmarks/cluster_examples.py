"""Three examples trained on one machine, and again with their episodes on three nodes of a Ray cluster.

    python benchmarks/cluster_examples.py [--only script] [--seeds 0 1 2] [--learners 2] [--quick] [--json]

The calculator; prover_verifier, whose two models are both trained; and script, whose agent is a shell script.
Each is its own config, trained by `etude train` as anybody would, on the cluster with `--on ADDRESS`, in
deterministic mode: so the weights should not differ in a bit. Nodes are raylets of one CPU on this machine.
`--learners N` trains once more, with every job's gradients on so many nodes too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster_nodes import cluster_of
from common import print_json, print_table, progress, silent

from etude.demo.demo import copy_example

NODES = 3


@dataclass(frozen=True)
class Example:
    """An example, and how much of it is trained here."""

    metric: str
    """The evaluator whose held-out mean is compared."""
    epochs: tuple[int, int]
    """In full, and with `--quick`."""
    held_out: tuple[int, int]
    base: str = ""
    """The example whose base model it takes, where that is another one."""
    options: tuple[str, ...] = ()


EXAMPLES = {
    "calculator": Example("correct", (80, 4), (512, 64)),
    "prover_verifier": Example("accuracy", (40, 2), (1024, 64)),
    "script": Example(
        "in_place",
        (60, 2),
        (256, 16),
        "sort",
        (
            "workflow.arguments.program=sorter.sh",
            "trajectory_builders.grpo.examples_per_epoch=8",
            "trajectory_builders.grpo.num_generations=16",
        ),
    ),
}


def make(name: str, folder: Path, seed: int, *, quick: bool) -> Path:
    """The example's folder, with its base model and its examples."""
    example = EXAMPLES[name]
    copy_example(name, folder / name)
    made = folder / (example.base or name)
    if example.base:
        copy_example(example.base, made)
    _run(["base.py", "--seed", str(seed), "--out", "base"], made)
    held_out = (made / "base" / "validation.jsonl").read_text().splitlines(keepends=True)
    (folder / name / "held_out.jsonl").write_text("".join(held_out[: example.held_out[quick]]))
    return folder / name


def train(
    name: str, folder: Path, seed: int, arm: str, options: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """Train the example; its held-out figures before and after, and the digests of its weights."""
    example = EXAMPLES[name]
    epochs = example.epochs[quick]
    overrides = [
        *example.options,
        "finetuning.deterministic=true",
        f"finetuning.seed={seed}",
        f"finetuning.num_epochs={epochs}",
        f"finetuning.run_configuration.validation_interval={epochs}",
        "finetuning.run_configuration.validation_dataset=held_out.jsonl",
    ]
    started = time.monotonic()
    given = [word for override in overrides for word in ("-o", override)]
    _run(["-m", "etude", "train", "config.yml", "--name", arm, *given, *options], folder)
    seconds = time.monotonic() - started
    summary = json.loads((folder / "runs" / arm / "summary.json").read_text())
    targets = summary.get("targets", {"": summary})
    measured = targets.get("verifier", summary)
    return {
        "before": measured["before"]["evaluators"][example.metric],
        "after": measured["after"]["evaluators"][example.metric],
        "epochs_trained": summary["epochs_trained"],
        "weights": {target: each["last_version"]["digest"] for target, each in targets.items()},
        "seconds": round(seconds, 1),
    }


def _run(arguments: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"python {' '.join(arguments)} failed: {done.stderr[-2000:]}")


def compare(
    name: str, seed: int, address: str, learners: int | None, tell: Any, *, quick: bool
) -> dict[str, Any]:
    """The example with a seed, trained in each of the ways."""
    on = ("--on", address, "-o", f"cluster.runners={NODES}")
    arms: dict[str, tuple[str, ...]] = {"one machine": (), f"{NODES} nodes": on}
    if learners:
        # A node's one CPU is either's: runners take none, so that there is room for both.
        both = ("-o", "cluster.num_cpus=0", "-o", f"cluster.learners={learners}")
        arms[f"{NODES} nodes, {learners} learners"] = (*on, *both)
    found: dict[str, Any] = {"example": name, "metric": EXAMPLES[name].metric, "seed": seed, "arms": {}}
    with TemporaryDirectory(prefix="cluster-examples-", ignore_cleanup_errors=True) as temporary:
        tell(f"{name}, seed {seed}: making its base model")
        folder = make(name, Path(temporary), seed, quick=quick)
        for arm, options in arms.items():
            tell(f"{name}, seed {seed}: {arm}")
            run = arm.replace(" ", "-").replace(",", "")
            found["arms"][arm] = came_to = train(name, folder, seed, run, options, quick=quick)
            tell(f"  {_interval(came_to['before'])} before, {_interval(came_to['after'])} after")
    one, three = found["arms"]["one machine"], found["arms"][f"{NODES} nodes"]
    found["equal_weights"] = one["weights"] == three["weights"]
    found["equal_rewards"] = (one["before"], one["after"]) == (three["before"], three["after"])
    return found


def rows(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each run."""
    for result in results:
        one = result["arms"]["one machine"]["weights"]
        for arm, run in result["arms"].items():
            yield [
                f"{result['example']}, seed {result['seed']}, {arm}",
                str(run["epochs_trained"]),
                _interval(run["before"]),
                _interval(run["after"]),
                str(run["after"]["n"]),
                "yes" if run["weights"] == one else "no",
                f"{run['seconds']:.0f}",
            ]


def _interval(figure: dict[str, Any]) -> str:
    return f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--learners", type=int, help="train on so many nodes too, in a third run")
    parser.add_argument("--quick", action="store_true", help="a few epochs only, and one seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    tell = silent if given.json else progress
    seeds = given.seeds or ([0] if given.quick else [0, 1, 2])
    with cluster_of(*[1] * NODES) as cluster:
        results = [
            compare(name, seed, cluster.address, given.learners, tell, quick=given.quick)
            for name in given.only
            for seed in seeds
        ]
    if given.json:
        print_json({"quick": given.quick, "nodes": NODES, "results": results})
        return
    columns = ("", "epochs", "before", "after", "held out", "weights of one machine", "seconds")
    print_table(
        "held-out means with 95 % intervals, one machine and three nodes", columns, list(rows(results)), ()
    )


if __name__ == "__main__":
    main()
