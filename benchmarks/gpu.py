"""The learner and the embedded engine on one GPU, with a model of half a billion parameters.

A Qwen2 with random weights in bfloat16; GRPO steps on 8 prompts x 8 completions of 512, on a prompt of 8192
x 8 completions of 512, and on 8 conversations of 6 turns up to 8k tokens, by token trees, padded and by TRL;
and sampling at 1, 8 and 64 requests. Times are wall times between waits for the device, in medians; the
share of the matrix rate is that of a large product measured in the same run. It needs what the extra `local`
installs; TRL is left out where it is not there. `--small` is a look at the whole on a CPU: its figures say
nothing.
"""

from __future__ import annotations

import platform
import random
from importlib.metadata import version
from typing import Any

import gpu_learner
import gpu_sampling
import torch
from common import parse_arguments, print_json, print_table, progress
from gpu_measuring import copy_rate, matrix_rate, top_kernels
from gpu_model import FULL, SMALL, Scale, policy_of

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
        found["exactness"] = gpu_learner.exactness(scale, device)
    policy = policy_of(scale, device, torch.bfloat16)
    if both or arguments.learner:
        costs = gpu_learner.measure(policy, scale, repeats, note)
        rows = [one.as_json(policy, rate) for one in costs]
        for peer in ("padded", "trl"):
            found[f"ratio_vs_{peer}"] = {row["shape"]: row[f"ratio_vs_{peer}"] for row in rows}
        found["learner"] = rows
    if both or arguments.sampling:
        found["sampling"] = [
            one.as_json() for one in gpu_sampling.measure(policy, scale, min(repeats, 3), note)
        ]
    if arguments.profile:
        note("profiles")
        found["profile"] = profiles(policy, scale, both or arguments.learner, both or arguments.sampling)
    return found


def profiles(policy: Any, scale: Scale, learner: bool, sampling: bool) -> dict[str, Any]:
    """The kernels that take longest: in a step of each shape, and in sampling."""
    found = {}
    for shape, make in scale.shapes.items() if learner else ():
        units = [(one,) for one in make(random.Random(0))]
        way = gpu_learner.Way(policy, units, "tree", scale.budgets[0])
        way.whole()
        found[shape] = top_kernels(way.whole, policy.device)
    if sampling:
        found["sampling"] = gpu_sampling.kernels(policy, scale)
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
    # On standard error with `--json` too: whoever is stopped half-way has seen half of the figures.
    found = measure(scale, device, arguments, progress)
    if arguments.json:
        print_json(found)
    else:
        print_results(found)


if __name__ == "__main__":
    main()
