"""Models of real size on a few cores: the cost of steps and sampled tokens, against peers and the limit.

SmolLM2-135M's shape and Qwen2.5-0.5B's with random weights. `--only PART` measures one of the parts: `step`
(gradients and whole steps of GRPO, and TRL), `sampling` (the embedded engine, `generate`, and vLLM where
ETUDE_TEST_VLLM names its program), `mismatch` (what engine and learner differ by in bfloat16), `run` (`etude
train` on the calculator). Each is in float32, and in bfloat16 where the CPU multiplies it. All ways take
turns; ratios are of CPU time, the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import real_run
import real_sampling
import real_step
import torch
from common import print_json, print_table, progress, silent
from real_model import DTYPES, LOOK, PRECISIONS, QWEN, SMOLLM, Note, Size, policy_of

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
        "step": lambda size: real_step.measure(size, flags.quick, note),
        "sampling": lambda size: real_sampling.measure(size, flags.quick, flags.threads, note),
        "mismatch": lambda size: real_sampling.mismatch(
            policy_of(size, DTYPES["bfloat16"]), size.prompt, size.answer
        ),
    }
    for part in flags.only:
        if part != "run":
            found[part] = {size.name: of_size[part](size) for size in sizes}
            continue
        plan = real_run.SMALL if flags.look else real_run.Plan()
        with tempfile.TemporaryDirectory() as folder:
            found[part] = real_run.measure(flags.folder or Path(folder), plan, flags.dtype, note)
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
        for peer in real_sampling.PEERS:
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
        ways = [*(f"etude {name}" for name in PRECISIONS), *real_sampling.PEERS]
        columns = ["", *ways, *(f"x {peer}" for peer in real_sampling.PEERS), "of limit"]
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
            *(_shown(row.get(f"vs_{peer}")) for peer in real_sampling.PEERS),
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
