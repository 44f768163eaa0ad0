"""A run at real size: the calculator's agent on a Llama of SmolLM2-135M's shape, by `etude train`.

The base model is warmed up from random weights as the demo's is, until it is right sometimes: but on right
transcripts, which it is stopped short of. On careless ones a model of this depth learns the format and copies
no digit. It has the demo's tokenizer; the rows of its vocabulary beyond that are there, cost what they cost,
and are never said.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from real_model import DTYPES, SMOLLM, Note, Size, policy_of

from demo import run
from etude.core.example import Example
from etude.core.keys import generator
from etude.inference.embedded import EmbeddedEngine
from etude.learner.learner import LearnerOptions
from etude.learner.plan import Schedule
from etude.learner.warm_up import Stage, warm_up
from etude.models.tiny import build_tokenizer, texts_of
from etude.rewards.evaluation_run import measure as evaluate
from etude.rollout.reply import describe_tools

EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator"

_DEEP = replace(SMOLLM, initializer_range=0.0245)


@dataclass(frozen=True)
class Plan:
    """The length of a run, and its learning rates."""

    size: Size = _DEEP
    silent_from: int = 2
    """The layer from which on layers begin by adding nothing to the states."""
    is_careless: bool = False
    """Whether the base model imitates careless transcripts."""
    epochs: int = 16
    examples: int = 16
    """Of an epoch, with 8 episodes each."""
    held_out: int = 512
    learning_rate: float = 3e-5
    warm_up_rate: float = 7e-4
    max_grad_norm: float = 0.3
    """Of the warm-up."""
    warm_up_steps: int = 400
    """After which the base model counts as out of reach."""
    first_check: int = 80
    reward: float = 0.25
    """Of the base model, at least."""


_DEMO = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
SMALL = Plan(
    Size("demo", "llama", _DEMO, {}, initializer_range=0.06),
    is_careless=True,
    epochs=4,
    examples=16,
    held_out=64,
    learning_rate=7e-4,
    warm_up_rate=3e-3,
    max_grad_norm=1.0,
    warm_up_steps=600,
    first_check=100,
)
"""The demo's own model: whether it runs."""


def measure(folder: Path, plan: Plan, dtype: str, note: Note) -> dict[str, Any]:
    """Make the base model in an empty folder (or take the one that is there), and train it."""
    base = folder / "base"
    made: dict[str, Any] = {}
    if not (base / "model").is_dir():
        note("the base model of the run")
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("base", "runs"))
        made = asyncio.run(_make_base(base, plan, dtype, note))
    note("etude train")
    return made | _train(folder, plan, dtype)


async def _make_base(base: Path, plan: Plan, dtype: str, note: Note) -> dict[str, Any]:
    sys.path.insert(0, str(base.parent))
    from agent import correct, solve  # type: ignore[import-not-found]
    from base import (  # type: ignore[import-not-found]
        TRAINING,
        careless_transcript,
        transcript,
        write_examples,
    )
    from task import calculator, draw_questions  # type: ignore[import-not-found]

    questions = draw_questions(TRAINING + plan.held_out, generator(0, "questions"))
    examples = [Example(f"question-{i}", {"question": q.text}, q.answer) for i, q in enumerate(questions)]
    write_examples(base / "train.jsonl", examples[:TRAINING])
    write_examples(base / "validation.jsonl", examples[TRAINING:])
    rng, tools = generator(0, "transcripts"), describe_tools([calculator])
    asked = questions[:TRAINING]
    shown = [careless_transcript(q, rng) if plan.is_careless else transcript(q) for q in asked]
    tokenizer = build_tokenizer(texts_of(shown, tools), splits=["[0-9+*]"])
    policy = policy_of(plan.size, DTYPES[dtype], tokenizer)
    with torch.no_grad():
        for layer in policy.model.model.layers[plan.silent_from :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    engine = EmbeddedEngine(policy, max_tokens=24)

    async def reward() -> float:
        return (await evaluate(solve, correct, engine, examples[:64], max_concurrency=64)).mean

    stage = Stage(
        "imitating an agent",
        shown,
        reward,
        at_least=plan.reward,
        tools=tools,
        options=LearnerOptions(
            learning_rate=plan.warm_up_rate,
            max_grad_norm=plan.max_grad_norm,
            schedule=Schedule(warmup_steps=20),
        ),
        batch_size=16,
        first_check=plan.first_check,
        max_steps=plan.warm_up_steps,
    )
    start, cpu = time.perf_counter(), time.process_time()
    try:
        (report,) = await warm_up(
            policy, [stage], seed=0, on_check=lambda name, value: note(f"{name}: {value:.3f}")
        )
    finally:
        await engine.close()
    policy.export(base / "model")
    return {
        "warm_up": {
            "steps": report.steps,
            "transcripts": report.steps * stage.batch_size,
            "reward": report.value,
            "minutes": round((time.perf_counter() - start) / 60, 2),
            "cpu_minutes": round((time.process_time() - cpu) / 60, 2),
        }
    }


def _train(folder: Path, plan: Plan, dtype: str) -> dict[str, Any]:
    """`etude train` in a process of its own, and what it printed."""
    overrides = {
        "llms.policy.dtype": dtype,
        "trajectory_builders.grpo.examples_per_epoch": plan.examples,
        "trainer_adapters.local.learning_rate": plan.learning_rate,
        "finetuning.num_epochs": plan.epochs,
        "finetuning.run_configuration.validation_interval": plan.epochs,
        "finetuning.output_dir": json.dumps(str(folder / "runs")),
    }
    options = [part for name, value in overrides.items() for part in ("-o", f"{name}={value}")]
    command = [sys.executable, "-m", "etude", "train", str(folder / "config.yml"), "--json", *options]
    start = time.perf_counter()
    events = list(run(command, start))
    trained = [event for event in events if event["event"] == "trained"]
    last = events[-1]
    mismatch = [event["metrics"]["training"]["mismatch_kl"] for event in trained]
    return {
        "dtype": dtype,
        "learning_rate": plan.learning_rate,
        "episodes": sum(event["metrics"]["episodes"] for event in trained),
        "before": _reward(last["before"]),
        "after": _reward(last["after"]),
        "minutes": round(last["at"] / 60, 2),
        "cpu_minutes": None if trained[-1]["cpu"] is None else round(trained[-1]["cpu"] / 60, 2),
        "mismatch_kl": {"mean": statistics.fmean(mismatch), "most": max(mismatch)},
        "curve": [
            {"minutes": round(event["at"] / 60, 2), "reward": event["metrics"]["avg_reward"]}
            for event in trained
        ],
    }


def _reward(found: dict[str, Any]) -> dict[str, Any]:
    """On held-out examples, with its 95 % interval."""
    return {
        "mean": found["avg_reward"],
        "low": found["reward_low"],
        "high": found["reward_high"],
        "n": found["n"],
    }
