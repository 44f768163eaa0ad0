"""Estimates of what a run costs, by `etude check`, against what the run then has cost.

    python benchmarks/estimates.py [--only calculator] [--seed 0] [--play 64] [--json]

Three examples, each with a price for its models: estimated by a few episodes that are played before anything
else, then trained as anybody would; estimated again by that run, and trained once more with another seed. An
error is the estimate over what was used, less one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster_examples import EXAMPLES, make
from common import print_json, print_table, progress

from etude.budget.bill import read_bill

PRICES = "{prompt: 0.15, completion: 0.60}"
"""In USD for a million tokens: those of a small hosted model."""

MODELS = {"calculator": ["policy"], "prover_verifier": ["prover", "verifier"], "script": ["sorter"]}


def measure(name: str, folder: Path, seed: int, play: int) -> Iterator[dict[str, Any]]:
    """A row for each of the two ways to estimate."""
    progress(f"{name}: making its base model")
    project = make(name, folder, seed, quick=False)
    prices = [f"llms.{model}.prices={PRICES}" for model in MODELS[name]]
    options = [word for option in prices for word in ("-o", option)]
    for way, words, own in (
        ("episodes played", ["--play", str(play)], seed),
        ("an earlier run", [], seed + 1),
    ):
        seeded = [*options, "-o", f"finetuning.seed={own}"]
        progress(f"{name}: estimating by {way}")
        estimate = json.loads(_etude(project, "check", "config.yml", "--json", *words, *seeded))["estimate"]
        progress(f"{name}: training with the seed {own}")
        _etude(project, "train", "config.yml", "--name", f"seed-{own}", *seeded)
        used = read_bill(project / "runs" / f"seed-{own}").total
        yield {
            "example": name,
            "by": way,
            "episodes": estimate["training_episodes"] + estimate["validation_episodes"],
            "measured_on": estimate["measured_on"],
            "estimated_usd": estimate["usd"]["mean"],
            "low": estimate["usd"]["low"],
            "high": estimate["usd"]["high"],
            "used_usd": used.usd,
            "error_percent": 100 * (estimate["usd"]["mean"] / used.usd - 1),
        }


def _etude(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "etude", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"etude {' '.join(arguments)}:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--play", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name in MODELS if arguments.only is None else [arguments.only]:
        assert name in EXAMPLES
        with TemporaryDirectory() as folder:
            rows += measure(name, Path(folder), arguments.seed, arguments.play)
    if arguments.json:
        print_json({"rows": rows})
        return
    columns = ("example", "estimated by", "episodes", "measured on", "estimate, USD", "used, USD", "error")
    shown = [
        [
            *(row["example"], row["by"], f"{row['episodes']:,}", f"{row['measured_on']:,}"),
            f"{row['estimated_usd']:.4f} [{row['low']:.4f}, {row['high']:.4f}]",
            *(f"{row['used_usd']:.4f}", f"{row['error_percent']:+.1f} %"),
        ]
        for row in rows
    ]
    print_table("Estimates of `etude check`", columns, shown, [f"prices: {PRICES}"])


if __name__ == "__main__":
    main()
