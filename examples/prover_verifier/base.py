"""Makes what the example starts from: instances, and two base models that play carelessly.

    python examples/prover_verifier/base.py --seed 0 --out base

Two models of their own, a prover and a verifier. Each first imitates careful agents, to learn what the
words mean, then careless ones: a prover that mostly names any line, a verifier that mostly looks anywhere
and often does not trust its eyes. So both speak the format, and together hardly beat a coin.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.models.tiny import TinyShape, build_policy, build_tokenizer, conversation_texts
from etude.protocols import Move, find_protocol
from etude.protocols.branching import FinalAnswer, Play, Question

from task import LINES, PROTOCOLS, VERIFIER, HiddenBug

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_up import Stage, StageReport, command, warm_up, write_examples

TRAIN, HELD_OUT = 1024, 1024
CAREFUL_PLAYS, CARELESS_PLAYS = 8_000, 4_000
SHAPE = TinyShape(hidden_size=48, intermediate_size=128, max_context=128)
SCENARIO = HiddenBug()


@dataclass
class Agents:
    """Scripted agents of one play, that are careful some of the time; they keep what they were asked."""

    rng: random.Random
    names: float
    """How often the prover names the line of the bug; otherwise, and without a bug, any line."""
    follows: float
    """How often the verifier looks where it was told to; otherwise anywhere."""
    believes: float
    """How often it judges by what it saw; otherwise it tosses a coin."""
    transcripts: dict[str, list[Message]] = field(default_factory=dict)

    async def ask(self, questions: Sequence[Question]) -> list[FinalAnswer]:
        """Answer the turns of a round."""
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> FinalAnswer:
        text = self._text(question)
        self.transcripts[question.turn.agent] = [*question.prompt, {"role": "assistant", "content": text}]
        act = SCENARIO.parse(text, question.turn)
        assert isinstance(act, Move)
        return FinalAnswer(0, text, act)

    def _text(self, question: Question) -> str:
        knows, told = question.prompt[0]["content"], question.prompt[-1]["content"]
        if question.turn.agent == VERIFIER:
            return self._look(told) if question.turn.decide == "no" else self._judge(told)
        place = re.match(r"accept bug (\d)", knows)
        return place[1] if place and self._is(self.names) else self._any_line()

    def _look(self, told: str) -> str:
        claims = re.findall(r"accept says (\d)", told)
        return self.rng.choice(claims) if claims and self._is(self.follows) else self._any_line()

    def _judge(self, told: str) -> str:
        seen = re.search(r"line \d (\w+)", told)
        if seen and self._is(self.believes):
            return "accept" if seen[1] == "broken" else "reject"
        return self.rng.choice(["accept", "reject"])

    def _any_line(self) -> str:
        return str(self.rng.randint(1, LINES))

    def _is(self, share: float) -> bool:
        return self.rng.random() < share


CAREFUL = {"names": 1.0, "follows": 1.0, "believes": 1.0}
CARELESS = {"names": 0.3, "follows": 0.3, "believes": 0.5}
LOSSES = {"prover": (0.68, 1.03), "verifier": (0.2, 0.57)}
"""For each model the loss that ends its first stage and its second; what chance alone costs is below."""


async def build_base(
    folder: Path, seed: int, progress: Callable[[str, float], None] = lambda what, value: None
) -> Sequence[StageReport]:
    """Write `train.jsonl`, `validation.jsonl`, `prover/` and `verifier/` into `folder`."""
    write_examples(folder / "train.jsonl", instances("train", TRAIN, generator(seed, "train")))
    write_examples(folder / "validation.jsonl", instances("held-out", HELD_OUT, generator(seed, "held out")))
    careful = await plays(CAREFUL_PLAYS, CAREFUL, generator(seed, "careful"))
    careless = await plays(CARELESS_PLAYS, CARELESS, generator(seed, "careless"))
    reports: list[StageReport] = []
    for number, model in enumerate(("prover", VERIFIER)):
        first, second = careful[model], careless[model]
        tokenizer = build_tokenizer(
            conversation_texts(first[:500]), vocab_size=320, splits=["[0-9]", "[a-z]+"]
        )
        policy = build_policy(tokenizer, seed + number, SHAPE)
        stages = [
            Stage(f"{model}, careful", first, at_most=LOSSES[model][0], batch_size=64),
            Stage(f"{model}, careless", second, at_most=LOSSES[model][1], batch_size=64),
        ]
        reports += await warm_up(policy, stages, seed=seed, on_check=progress)
        policy.export(folder / model)
    return reports


def instances(name: str, count: int, rng: random.Random) -> list[Example]:
    """Each with a bug or without, as a coin falls; the bug at any line."""
    return [
        Example(f"{name}-{i}", {"bug": rng.randint(1, LINES) if rng.random() < 0.5 else 0})
        for i in range(count)
    ]


async def plays(count: int, agents: dict[str, Any], rng: random.Random) -> dict[str, list[list[Message]]]:
    """Prompts and answers of the models of scripted agents, in all protocols in turn."""
    protocols = [find_protocol(name, arguments) for name, arguments in PROTOCOLS.items()]
    found: dict[str, list[list[Message]]] = {"prover": [], VERIFIER: []}
    for number, example in enumerate(instances("warm-up", count, rng)):
        scripted = Agents(rng, **agents)
        protocol = protocols[number % len(protocols)]
        await Play(protocol, SCENARIO, example, scripted.ask, key=number).grow()
        for agent, transcript in scripted.transcripts.items():
            found[VERIFIER if agent == VERIFIER else "prover"].append(transcript)
    return found


if __name__ == "__main__":
    command(build_base, Path(__file__).parent / "base")
