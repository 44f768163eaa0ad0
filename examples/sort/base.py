"""Makes what the example starts from: letters to sort, and a base model that mostly shuffles them.

    python examples/sort/base.py --seed 0 --out examples/sort/base

The base model imitates an agent that sorts now and then, and otherwise repeats the letters in any order.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.engines.embedded import EmbeddedEngine
from etude.models.tiny import build_policy, build_tokenizer

from agent import in_place, sort

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_up import Stage, StageReport, command, measure, warm_up, write_examples

ALPHABET, COUNT = "abcdefghijkl", 6
TRAIN, HELD_OUT, TRANSCRIPTS = 4096, 512, 20_000
CARE = 0.3
"""How often the careless agent sorts."""
REWARD = 0.34
MEASURED = 256


async def build_base(
    folder: Path, seed: int, progress: Callable[[str, float], None]
) -> Sequence[StageReport]:
    """Write `train.jsonl`, `validation.jsonl` and `model/` into `folder`. No letters are in both files."""
    drawn = _draw(TRAIN + HELD_OUT, generator(seed, "letters"))
    train = [_example(f"train-{i}", letters) for i, letters in enumerate(drawn[:TRAIN])]
    write_examples(folder / "train.jsonl", train)
    held_out = [_example(f"held-out-{i}", letters) for i, letters in enumerate(drawn[TRAIN:])]
    write_examples(folder / "validation.jsonl", held_out)
    rng = generator(seed, "careless")
    transcripts = [careless(rng.choice(drawn[:TRAIN]), rng) for _ in range(TRANSCRIPTS)]
    texts = [message["content"] for transcript in transcripts[:500] for message in transcript]
    policy = build_policy(build_tokenizer(texts, splits=["[a-z](?![a-z]*:)"]), seed)
    engine = EmbeddedEngine(policy)

    async def reward() -> float:
        return (await measure(sort, in_place, engine, train[:MEASURED], seed=seed)).mean

    stage = Stage("careless transcripts", transcripts, reward, REWARD)
    try:
        reports = await warm_up(policy, [stage], seed=seed, on_check=progress)
    finally:
        await engine.close()
    policy.export(folder / "model")
    return reports


def careless(letters: str, rng: random.Random) -> list[Message]:
    """The answer of the careless agent."""
    answer = sorted(letters) if rng.random() < CARE else rng.sample(letters, len(letters))
    return [
        {"role": "user", "content": f"Sort: {letters}"},
        {"role": "assistant", "content": "".join(answer)},
    ]


def _draw(count: int, rng: random.Random) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(rng.sample(ALPHABET, COUNT))] = None
    return list(drawn)


def _example(name: str, letters: str) -> Example:
    return Example(name, {"letters": letters}, "".join(sorted(letters)))


if __name__ == "__main__":
    command(build_base, Path(__file__).parent / "base")
