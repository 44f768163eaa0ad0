"""Makes the model that both roles of `pair.yml` start from: it sorts now and then, and shuffles otherwise.

python pair_base.py --seed 0 --out base
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

from etude.core.keys import generator
from etude.core.message import Message
from etude.learner.warm_up import Stage, warm_up
from etude.models.tiny import build_policy, build_tokenizer

ALPHABET, COUNT, TRANSCRIPTS = "abcdefgh", 3, 4_000
CARE = 0.3
"""How often the careless agents sort."""
LOSS = 0.48
"""Nats per token, at which most answers are the letters that were asked about, in some order."""


def transcript(rng: random.Random) -> list[Message]:
    """A question to the proposer or to the checker, and a careless answer."""
    letters = "".join(rng.sample(ALPHABET, COUNT))
    proposed = f"\nProposed: {answer(letters, rng)}" if rng.random() < 0.5 else ""
    question = f"Sort: {letters}{proposed}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer(letters, rng)}]


def answer(letters: str, rng: random.Random) -> str:
    """The letters, sorted or in any order."""
    return "".join(sorted(letters) if rng.random() < CARE else rng.sample(letters, len(letters)))


async def build(folder: Path, seed: int) -> None:
    """Write the model into `folder`."""
    rng = generator(seed, "careless")
    transcripts = [transcript(rng) for _ in range(TRANSCRIPTS)]
    texts = [message["content"] for each in transcripts[:500] for message in each]
    policy = build_policy(build_tokenizer(texts, splits=["[a-z](?![a-z]*:)"]), seed)
    stage = Stage("careless transcripts", transcripts, at_most=LOSS)
    reports = await warm_up(policy, [stage], seed=seed, on_check=lambda name, loss: print(f"{loss:.3f}"))
    print(f"{reports[0].value:.3f} nats per token after {reports[0].steps} steps")
    policy.export(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base")
    given = parser.parse_args()
    asyncio.run(build(given.out, given.seed))
