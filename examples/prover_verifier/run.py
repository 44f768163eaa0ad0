"""Trains a tiny prover and a tiny verifier on each other, and compares the protocols with their optima.

    python examples/prover_verifier/run.py [--algorithm grpo|expert_iteration|malt] [--quick] [--json]
    python examples/prover_verifier/run.py --train-on debate --protocols debate

Two models are made from scratch, measured in each protocol on held-out instances, trained in one of them,
and measured again. So the rows of the other protocols say what carries over; nothing was trained on them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.config.import_path import make_importable
from etude.config.load import load_config
from etude.config.schema import Config
from etude.loop.evaluation import load_version_engine, measure
from etude.runtime import open_runtime
from etude.store.facts import BASE, LAST, choose_version
from etude.verbs import new_run, train_in

from base import build_base
from task import LINES, PROTOCOLS, optimum

HERE = Path(__file__).parent
MODELS = ("prover", "verifier")
PROVERS = {"solo_verifier": (), "debate": ("prover0", "prover1"), "mnip": ("prover0", "prover1")}
"""Agents of the prover's model in a protocol, where it is not one `prover`."""
ALGORITHMS = {"grpo": ("one_step", 40), "expert_iteration": ("small_steps", 40), "malt": ("small_steps", 30)}
"""For each its adapter in the config, and its epochs."""


async def run(
    folder: Path, algorithm: str, seed: int, trained_on: str, measured: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """Everything, written into `folder`: the accuracies by protocol, and how long it took.

    Bases that are there already are used again.
    """
    started = time.monotonic()
    make_importable(HERE)
    if not (folder / "base").exists():
        await build_base(folder / "base", seed)
    made = time.monotonic()
    config = make_config(folder, algorithm, seed, trained_on, epochs=8 if quick else ALGORITHMS[algorithm][1])
    with new_run(config, algorithm) as training:
        await train_in(config, training)
    trained = time.monotonic()
    protocols: dict[str, Any] = {}
    for protocol in measured:
        config = make_config(folder, algorithm, seed, protocol)
        before, after = [
            await accuracy(config, training.path, version, protocol, 256 if quick else None)
            for version in (BASE, LAST)
        ]
        protocols[protocol] = {
            "accuracy_before": before["mean"],
            "accuracy_after": after["mean"],
            "ci95_before": [before["low"], before["high"]],
            "ci95": [after["low"], after["high"]],
            "n": after["n"],
            "optimum": optimum(protocol),
            "trained": protocol == trained_on,
        }
    ended = time.monotonic()
    seconds = {"bases": made - started, "training": trained - made, "measuring": ended - trained}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "lines": LINES,
        "without_prover": optimum("nip", told=False),
        "protocols": protocols,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def make_config(folder: Path, algorithm: str, seed: int, protocol: str, epochs: int | None = None) -> Config:
    """The example's config, with everything that it reads and writes in `folder`."""
    provers = PROVERS.get(protocol, ("prover",))
    policies = dict.fromkeys(provers, "prover") | {"verifier": "verifier"}
    overrides: dict[str, Any] = {
        "workflow.protocol": protocol,
        "workflow.arguments": PROTOCOLS[protocol],
        "workflow.policies": policies,
        "llms.prover.model": str(folder / "base" / "prover"),
        "llms.verifier.model": str(folder / "base" / "verifier"),
        "eval.general.dataset": str(folder / "base" / "train.jsonl"),
        "finetuning.run_configuration.validation_dataset": str(folder / "base" / "validation.jsonl"),
        "finetuning.targets.prover.trajectory_builder": algorithm,
        "finetuning.targets.verifier.trajectory_builder": algorithm,
        "finetuning.targets.prover.trainer_adapter": ALGORITHMS[algorithm][0],
        "finetuning.targets.verifier.trainer_adapter": ALGORITHMS[algorithm][0],
        "finetuning.output_dir": str(folder / "runs"),
        "finetuning.seed": seed,
    }
    if epochs is not None:
        overrides["finetuning.num_epochs"] = epochs
        # The table measures on the held-out instances, before and after: once is enough.
        overrides["finetuning.run_configuration.validation_dataset"] = None
        overrides["eval.evaluators.earned_by_prover.agent"] = provers[0]
    else:
        # Who earns what is of no interest here, and not every protocol has both.
        overrides["eval.evaluators"] = {"accuracy": {"_type": "verdict_accuracy"}}
        for model in MODELS:
            overrides[f"finetuning.targets.{model}.reward_function.name"] = "accuracy"
    return load_config(
        HERE / "config.yml", [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    )


async def accuracy(
    config: Config, training: Path, version: str, protocol: str, limit: int | None
) -> dict[str, Any]:
    """The verifier's accuracy on held-out instances, both models at a version, one play each."""
    chosen = {model: choose_version(training, f"{model}:{version}") for model in MODELS}
    engines = {model: await load_version_engine(config, model, chosen[model]) for model in MODELS}
    try:
        with new_run(config, f"{training.name}-{protocol}-{version}") as folder:
            async with open_runtime(config, folder, engines=engines) as runtime:
                examples = runtime.validation_examples[:limit]
                found = await measure(runtime, examples, model=version)
    finally:
        for engine in engines.values():
            await engine.close()
    return found.scores()["accuracy"]


def table(found: dict[str, Any]) -> str:
    """The accuracies, in words."""
    lines = [f"{'protocol':14}{'before':>8}{'after':>8}   {'95 %':15}{'optimum':>8}   n"]
    for name, row in found["protocols"].items():
        low, high = row["ci95"]
        lines.append(
            f"{name:14}{row['accuracy_before']:8.3f}{row['accuracy_after']:8.3f}   "
            f"{f'[{low:.3f}, {high:.3f}]':15}{row['optimum']:8.3f}   {row['n']}"
            + ("   trained" if row["trained"] else "")
        )
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found["seconds"].items())
    return "\n".join(
        [*lines, f"nip without a prover to tell where to look: {found['without_prover']:.3f}", seconds]
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-on", choices=["nip", "mnip", "debate", "adp"], default="nip")
    parser.add_argument(
        "--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS), help="what to measure"
    )
    parser.add_argument("--quick", action="store_true", help="a few epochs only, fewer held-out instances")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--out", type=Path, help="a folder to keep everything in")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (wanted.out or Path(temporary)).absolute()
        found = asyncio.run(
            run(folder, wanted.algorithm, wanted.seed, wanted.train_on, wanted.protocols, quick=wanted.quick)
        )
    print(json.dumps(found) if wanted.as_json else table(found))


if __name__ == "__main__":
    main()
