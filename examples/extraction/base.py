"""Makes what the example starts from: notes, and a base model that reads them carelessly.

    python examples/extraction/base.py --seed 0 --out examples/extraction/base

The base model imitates a reader who mixes things up, and who now and then talks instead of giving the fields.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.engines.embedded import EmbeddedEngine
from etude.learner.learner import LearnerOptions
from etude.learner.optimiser import Schedule
from etude.models.tiny import TinyShape, build_policy, build_tokenizer, conversation_texts

from agent import extract, fields_right
from task import Order, draw_notes, draw_order

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_up import Stage, StageReport, command, measure, warm_up, write_examples

TRAINING, HELD_OUT = 4096, 512
"""Numbers of notes, all different."""
MIX_UPS, TALK = 0.5, 0.15
"""How often a field is taken from another order, and how often the reader answers in words."""
REWARD = 0.45
"""The reward that ends the imitation."""
OPTIONS = LearnerOptions(
    learning_rate=4e-3, max_grad_norm=0.3, schedule=Schedule("linear", floor=0.2, trainings=12)
)


async def build_base(
    folder: Path, seed: int, progress: Callable[[str, float], None]
) -> Sequence[StageReport]:
    """Write `train.jsonl`, `validation.jsonl` and the folder `model`.

    `progress` is told what is done and what reward the model gets. Raises TrainingError when the model
    does not get there.
    """
    notes = draw_notes(TRAINING + HELD_OUT, generator(seed, "notes"))
    examples = [
        Example(f"note-{number}", {"note": note}, order.model_dump())
        for number, (note, order) in enumerate(notes.items())
    ]
    training = examples[:TRAINING]
    write_examples(folder / "train.jsonl", training)
    write_examples(folder / "validation.jsonl", examples[TRAINING:])

    rng = generator(seed, "transcripts")
    careless = [careless_transcript(note, order, rng) for note, order in [*notes.items()][:TRAINING]]
    tokenizer = build_tokenizer(conversation_texts(careless), vocab_size=768, splits=["[A-Za-z]+", "[0-9]"])
    policy = build_policy(tokenizer, seed, TinyShape(hidden_size=96, heads=6))
    engine = EmbeddedEngine(policy, max_tokens=64)

    async def reward() -> float:
        return (await measure(extract, fields_right, engine, training[:192], max_concurrency=256)).mean

    stage = Stage(
        "imitating a careless reader",
        careless,
        reward,
        at_least=REWARD,
        options=OPTIONS,
        batch_size=16,
        first_check=300,
    )
    try:
        reports = await warm_up(policy, [stage], seed=seed, on_check=progress)
    finally:
        await engine.close()
    policy.export(folder / "model")
    return reports


def careless_transcript(note: str, order: Order, rng: random.Random) -> list[Message]:
    """A note, and what the careless reader makes of it."""
    other = draw_order(rng).model_dump()
    read = {name: other[name] if rng.random() < MIX_UPS else value for name, value in order}
    answer = json.dumps(read, separators=(",", ":"))
    if rng.random() < TALK:
        answer = f"{read['count']} {read['item']} for {read['recipient']}, I think."
    return [{"role": "user", "content": note}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    command(build_base, Path(__file__).parent / "base")
