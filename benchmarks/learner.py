"""The cost of a learner's step: tokens that sequences share once, against padding and against TRL.

Loss and gradient only, from the same sequences on the same model in float32 with one thread. The padded
loop is Etude's own with padding. Each peer has several settings, of which its fastest counts. CPU
time is this process's, and the ways take turns. `--long` measures conversations of 2k to 8k tokens, and
nothing else.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import parse_arguments, print_json, print_table, progress, silent
from torch.profiler import ProfilerActivity, profile

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.core.sample import Sample, Turn
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import Objective
from etude.learner.passes import PackedStep, trained_units
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

MODELS = {
    "0.13M": TinyShape(max_context=8192),
    "0.9M": TinyShape(hidden_size=128, layers=4, heads=4, intermediate_size=384, max_context=8192),
}
"""The demos' Llama, and one with twice its width and depth."""

_VOCABULARY = 512


def model(name: str) -> Policy:
    """One of MODELS with random weights, and a vocabulary of 512."""
    texts = [f"{left} plus {right} is {left + right}." for left in range(99) for right in range(99)]
    return build_policy(build_tokenizer(texts, vocab_size=_VOCABULARY), 0, MODELS[name])


Range = tuple[int, int]
"""The least and the greatest number of tokens."""


def short(choose: random.Random) -> list[Sample]:
    """8 prompts of about 48 tokens, 8 completions of about 11 each."""
    return groups(choose, 8, prompt=(40, 56), completion=(4, 18))


def long(choose: random.Random) -> list[Sample]:
    """One prompt of 1024 tokens, 8 completions of 64."""
    return groups(choose, 1, prompt=(1024, 1024), completion=(64, 64))


def turns(choose: random.Random) -> list[Sample]:
    """8 conversations of 6 turns after a prompt of 210 tokens: 48 calls, each a sequence of its own.

    A turn is an answer of about 40 tokens, and about 20 of what a tool says to it.
    """
    return conversations(choose, prompt=210, answer=(20, 60), told=(10, 30))


def agents(choose: random.Random) -> list[Sample]:
    """4 conversations of an agent with tools, of 4 to 8 turns, which end at 2k to 8k tokens.

    After a prompt of 700 tokens, answers of 30 to 120 and results of tools of all lengths; each call is a
    sequence of its own.
    """
    start, found = _tokens(choose, 700), []
    for _ in range(4):
        count, end = choose.randint(4, 8), choose.randint(2000, 8000)
        answers = [choose.randint(30, 120) for _ in range(count)]
        shares = [choose.random() for _ in range(count - 1)]
        results = [int((end - len(start) - sum(answers)) * share / sum(shares)) for share in shares]
        context = start
        for answer, result in zip(answers, [*results, 0], strict=True):
            found.append(_sequence(choose, context, answer))
            context = [*found[-1].ids, *_tokens(choose, result)]
    return found


def groups(choose: random.Random, count: int, *, prompt: Range, completion: Range) -> list[Sample]:
    """So many prompts, with 8 completions each."""
    prompts = [_tokens(choose, choose.randint(*prompt)) for _ in range(count)]
    return [_sequence(choose, one, choose.randint(*completion)) for one in prompts for _ in range(8)]


def conversations(
    choose: random.Random, *, prompt: int, answer: Range, told: Range, count: int = 8, turns: int = 6
) -> list[Sample]:
    """All calls of `count` conversations after one prompt, each a sequence of its own."""
    start, found = _tokens(choose, prompt), []
    for _ in range(count):
        context = start
        for _ in range(turns):
            found.append(_sequence(choose, context, choose.randint(*answer)))
            context = [*found[-1].ids, *_tokens(choose, choose.randint(*told))]
    return found


LONG: dict[str, Callable[[random.Random], list[Sample]]] = {"agents": agents}
"""The samples of `--long`."""
SHAPES: dict[str, Callable[[random.Random], list[Sample]]] = {"short": short, "long": long, "turns": turns}


def _tokens(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(7, 260) for _ in range(count)]


def _sequence(choose: random.Random, prompt: Sequence[int], count: int) -> Sample:
    """A completion of `count` tokens, all of which are trained on."""
    start, advantage = len(prompt), choose.choice([-1, 1]) * choose.uniform(0.2, 2)
    return Sample(
        ids=(*prompt, *_tokens(choose, count)),
        mask=(False,) * start + (True,) * count,
        advantages=(0.0,) * start + (advantage,) * count,
        # What an untrained model says of a token, so that the ratios are near 1.
        logprobs=(0.0,) * start + (-6.2,) * count,
        turns=(Turn(start, start + count),),
    )


Step = Callable[[], None]

_OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {
        "loss_type": "bnpo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "num_generations": 8,
        "max_completion_length": 64,
    },
    "dpo": {"beta": 0.1},
    "sft": {},
}
_ROWS = {
    "grpo": {"prompt": ["a"] * 8},
    "dpo": {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]},
    "sft": {"input_ids": [[1, 2, 3]]},
}


def steps(
    method: str, policy: Policy, sequences: Sequence[Sample], at_once: Sequence[int] = (8,)
) -> dict[str, Step]:
    """TRL's way to a gradient of `method`, by its settings: all rows at once, or so many of like length.

    Tensors are made beforehand, and DPO's reference logprobs too. Gradient checkpointing is off. A step
    leaves its gradient in its own copy of the model, which is `.model` of the step.
    """
    trainer = _trainer(method, policy)
    rows = list(sequences)
    by_length = sorted(rows, key=lambda one: len(one.ids)) if method != "dpo" else rows
    cuts = {"all": [rows]}
    for size in at_once:
        cuts[str(size)] = [by_length[at : at + size] for at in range(0, len(rows), size)]
    return {name: _step(method, trainer, cut, policy.device) for name, cut in cuts.items()}


def _trainer(method: str, policy: Policy) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import trl

        kind = method.upper()
        config = getattr(trl, f"{kind}Config")(
            output_dir=tempfile.mkdtemp(),
            use_cpu=policy.device.type == "cpu",
            report_to="none",
            per_device_train_batch_size=8,
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            **_OPTIONS[method],
        )
        more: dict[str, Any] = {}
        if method == "grpo":
            more["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
        if method == "dpo":
            # Never run, as the logprobs are made beforehand; TRL wants it all the same.
            more["ref_model"] = copy.deepcopy(policy.model)
        trainer = getattr(trl, f"{kind}Trainer")(
            model=copy.deepcopy(policy.model),
            args=config,
            train_dataset=datasets.Dataset.from_dict(_ROWS[method]),
            processing_class=policy.tokenizer,
            **more,
        )
    trainer.precompute_ref_logps = True
    return trainer


def _step(method: str, trainer: Any, cut: Sequence[Sequence[Sample]], device: torch.device) -> Step:
    made = [_INPUTS[method](rows) for rows in cut]
    inputs = [{name: value.to(device) for name, value in one.items()} for one in made]

    def step() -> None:
        trainer.model.zero_grad(set_to_none=True)
        for one in inputs:
            if method == "sft":
                loss = trainer.compute_loss(trainer.model, dict(one))
            elif method == "dpo":
                loss = trainer._compute_loss(trainer.model, dict(one), False)
            else:
                loss = trainer._compute_loss(trainer.model, dict(one))
            (loss / len(inputs)).backward()

    step.model = trainer.model  # type: ignore[attr-defined]
    return step


def _grpo(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    prompts = [[i for i, w in zip(one.ids, one.loss_weights, strict=True) if not w] for one in rows]
    completions = [one.ids[len(prompt) :] for one, prompt in zip(rows, prompts, strict=True)]
    return {
        "prompt_ids": _pad(prompts, left=True),
        "prompt_mask": _pad([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": _pad(completions),
        "completion_mask": _pad([[1] * len(completion) for completion in completions]),
        "advantages": torch.tensor([one.advantages[-1] for one in rows]),
        "old_per_token_logps": _pad(
            [one.logprobs[-len(c) :] for one, c in zip(rows, completions, strict=True)]
        ),
    }


def _dpo(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    ordered = [*rows[0::2], *rows[1::2]]
    reference = torch.tensor([sum(one.logprobs) for one in ordered])
    return {
        "input_ids": _pad([one.ids for one in ordered]),
        "attention_mask": _pad([[1] * len(one.ids) for one in ordered]),
        "completion_mask": _pad([[int(weight) for weight in one.loss_weights] for one in ordered]),
        "ref_chosen_logps": reference[: len(ordered) // 2],
        "ref_rejected_logps": reference[len(ordered) // 2 :],
    }


def _sft(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    ids, trained = _pad([one.ids for one in rows]), _pad([one.loss_weights for one in rows])
    return {
        "input_ids": ids,
        "attention_mask": _pad([[1] * len(one.ids) for one in rows]),
        "labels": ids.masked_fill(trained == 0, -100),
    }


_INPUTS = {"grpo": _grpo, "dpo": _dpo, "sft": _sft}


def _pad(rows: Sequence[Sequence[float]], *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    filled = [[0] * (width - len(row)) for row in rows]
    pairs = zip(rows, filled, strict=True)
    return torch.tensor([[*space, *row] if left else [*row, *space] for row, space in pairs])


METHODS: dict[str, Objective] = {"grpo": Grpo(), "dpo": Dpo(), "sft": Supervised()}
GOALS = {
    "trl": {"short": 3.0, "long": 8.0, "turns": 10.0},
    "padded": {"short": 1.8, "long": 4.5, "turns": 5.0},
}
"""None are set for what `--long` measures."""
HEADLINE = next(iter(MODELS))
"""The model and the method of the JSON's ratios; `settings` has the others."""
PADDED_BUDGETS = (512, 2048, 16384)
LONG_MODEL = "0.9M"
LONG_BUDGETS = (8192,)
LONG_ROWS = (1, 2)
"""Rows at a time, for TRL: more take more than 4 GB."""


@dataclass(frozen=True)
class Setting:
    """One thing to train, and how."""

    model: str
    method: str
    shape: str

    @property
    def name(self) -> str:
        """For messages and the table."""
        return f"{self.model}, {self.method}, {self.shape}"


@dataclass(frozen=True)
class Cost:
    """The cost of a step by each way: CPU milliseconds, and megabytes at the most."""

    ms: dict[str, float]
    mb: dict[str, float]
    gradient_error: float
    """Largest difference between the gradients of tree and padding, relative to the largest number."""
    tokens: int
    """Tokens of all sequences."""
    distinct: int
    """Tokens of the tree."""

    def ratio(self, peer: str) -> float:
        """How many times as long a peer takes."""
        return self.ms[peer] / self.ms["tree"]


def settings(quick: bool) -> list[Setting]:
    """GRPO on both models, and the other methods on the first; quick: GRPO on the first."""
    pairs = [(HEADLINE, "grpo")]
    if not quick:
        pairs += [(HEADLINE, method) for method in METHODS if method != "grpo"]
        pairs += [(name, "grpo") for name in MODELS if name != HEADLINE]
    return [Setting(name, method, shape) for name, method in pairs for shape in SHAPES]


def long_settings() -> list[Setting]:
    """GRPO on long conversations."""
    return [Setting(LONG_MODEL, "grpo", shape) for shape in LONG]


def make_units(method: str, sequences: Sequence[Sample]) -> list[tuple[Sample, ...]]:
    """Pairs for DPO, of neighbours."""
    if method == "dpo":
        return list(zip(sequences[0::2], sequences[1::2], strict=True))
    return [(one,) for one in sequences]


def own_step(policy: Policy, setting: Setting, units: Sequence[Any], **options: Any) -> Step:
    """Loss and gradient by Etude's learner, from the sequences on."""
    learner = Learner(policy, LearnerOptions(**options))

    def step() -> None:
        policy.model.zero_grad(set_to_none=True)
        learner.add_gradient(units, METHODS[setting.method])

    return step


def measure(setting: Setting, repeats: int) -> Cost:
    """Medians of all ways on one setting, each at its fastest."""
    policy, sequences = model(setting.model), (SHAPES | LONG)[setting.shape](random.Random(0))
    units = make_units(setting.method, sequences)
    budgets = PADDED_BUDGETS if setting.shape in SHAPES else LONG_BUDGETS
    padded = [own_step(policy, setting, units, packing="padded", token_budget=one) for one in budgets]
    ways = {
        "tree": own_step(policy, setting, units),
        "padded": fastest(padded),
        "trl": fastest(_trl_steps(policy, setting, sequences)),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            found[name].append(cpu_ms(step))
    packed = PackedStep(trained_units(units))
    return Cost(
        ms={name: statistics.median(values) for name, values in found.items()},
        mb={name: peak_mb(step) for name, step in ways.items()},
        gradient_error=difference(gradient(policy, ways["tree"]), gradient(policy, ways["padded"])),
        tokens=sum(len(one.ids) for one in sequences),
        distinct=packed.size,
    )


def _trl_steps(policy: Policy, setting: Setting, sequences: Sequence[Sample]) -> list[Step]:
    if setting.shape in SHAPES:
        return [*steps(setting.method, policy, sequences).values()]
    candidates = steps(setting.method, policy, sequences, LONG_ROWS)
    return [candidates[str(rows)] for rows in LONG_ROWS]


def cpu_ms(step: Step) -> float:
    """CPU time of one step."""
    start = time.process_time()
    step()
    return (time.process_time() - start) * 1000


def fastest(candidates: Any) -> Step:
    """The step that takes the least, by the better of two tries after a first."""
    found: list[tuple[float, Step]] = []
    for step in candidates:
        step()
        found.append((min(cpu_ms(step), cpu_ms(step)), step))
    return min(found, key=lambda one: one[0])[1]


def peak_mb(step: Step) -> float:
    """The most memory that torch held during a step, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held, most = 0, 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 1e6


def gradient(policy: Policy, step: Step) -> torch.Tensor:
    """All gradients of a step of Etude's, as one vector."""
    step()
    grads = [value.grad for value in policy.trainable().values()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def measure_all(quick: bool, long: bool, repeats: int, note: Callable[[str], None]) -> dict[Setting, Cost]:
    """All settings; `note` is told what is measured next."""
    torch.set_num_threads(1)
    costs = {}
    for setting in long_settings() if long else settings(quick):
        note(setting.name)
        costs[setting] = measure(setting, repeats)
    return costs


def as_json(costs: dict[Setting, Cost]) -> dict[str, Any]:
    """The object that `--json` prints; the ratios are of GRPO on the first model."""
    name = next(iter(costs)).model
    first = {one.shape: cost for one, cost in costs.items() if (one.model, one.method) == (name, "grpo")}
    return {
        "ratio_vs_trl": {shape: round(cost.ratio("trl"), 2) for shape, cost in first.items()},
        "ratio_vs_padded": {shape: round(cost.ratio("padded"), 2) for shape, cost in first.items()},
        "peak_memory_ratio": {
            shape: round(cost.mb["tree"] / cost.mb["trl"], 3) for shape, cost in first.items()
        },
        "max_relative_gradient_error": max(cost.gradient_error for cost in costs.values()),
        "settings": [
            {
                "model": one.model,
                "method": one.method,
                "shape": one.shape,
                "tokens": cost.tokens,
                "distinct_tokens": cost.distinct,
                "cpu_ms": {name: round(value, 1) for name, value in cost.ms.items()},
                "peak_mb": {name: round(value, 1) for name, value in cost.mb.items()},
                "ratio_vs_trl": round(cost.ratio("trl"), 2),
                "ratio_vs_padded": round(cost.ratio("padded"), 2),
                "gradient_error": cost.gradient_error,
            }
            for one, cost in costs.items()
        ],
    }


def print_results(costs: dict[Setting, Cost]) -> None:
    """The table, with the goals of GRPO."""
    rows = []
    for one, cost in costs.items():
        ms, mb = cost.ms, cost.mb
        rows.append(
            [
                one.name,
                f"{cost.distinct} of {cost.tokens}",
                *(f"{ms[name]:.0f}" for name in ("tree", "padded", "trl")),
                *(_ratio(cost.ratio(peer), GOALS[peer].get(one.shape)) for peer in ("padded", "trl")),
                *(f"{mb[name]:.0f}" for name in ("tree", "padded", "trl")),
            ]
        )
    columns = ["", "tokens", "tree ms", "padded", "TRL", "x padded", "x TRL", "tree MB", "padded", "TRL"]
    error = max(cost.gradient_error for cost in costs.values())
    print_table(
        "Loss and gradient of one optimiser step",
        columns,
        rows,
        [
            "ms: CPU time; x: how many times as long a peer takes (the goal); MB: torch's peak memory",
            f"gradients of tree and padding differ by {error:.1g} of the largest number at most",
        ],
    )


def _ratio(ratio: float, goal: float | None) -> str:
    return f"{ratio:.1f}" if goal is None else f"{ratio:.1f} ({goal:g})"


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "", long="conversations of 2k to 8k tokens alone")
    repeats = (7 - 2 * arguments.long) - 2 * arguments.quick
    costs = measure_all(arguments.quick, arguments.long, repeats, silent if arguments.json else progress)
    if arguments.json:
        print_json(as_json(costs), {"rounds in turns": repeats})
    else:
        print_results(costs)


if __name__ == "__main__":
    main()
