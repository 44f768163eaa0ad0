"""Makes what the example starts from: questions, and a base model that is careless.

    python examples/calculator/base.py --seed 0 --out examples/calculator/base

The base model imitates an agent that often does not bother to use the calculator, and now and
then mistypes or misreads. It ends up with about a third of the answers right.
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
from etude.rollout.tools import describe_tools

from agent import correct, solve
from task import Question, calculator, draw_questions

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_up import Stage, StageReport, command, measure, warm_up, write_examples

TRAINING, HELD_OUT = 4096, 512
"""Numbers of questions, all different."""

GUESSES, MISTYPES, MISREADS = 0.45, 0.1, 0.1
"""How often the careless agent guesses, types a wrong digit, or repeats the result with a wrong digit.
It is right in about a third of all cases."""

REWARD = 0.33
"""The reward that ends the imitation."""

OPTIONS = LearnerOptions(
    learning_rate=4e-3, max_grad_norm=0.3, schedule=Schedule("linear", floor=0.2, trainings=12)
)
"""How it imitates. The rate falls from check to check: a policy that still jumps about copies badly."""


async def build_base(
    folder: Path, seed: int, progress: Callable[[str, float], None]
) -> Sequence[StageReport]:
    """Write `train.jsonl`, `validation.jsonl` and the folder `model`.

    `progress` is told what is done and what reward the model gets. Raises TrainingError when the model
    does not get there.
    """
    questions = draw_questions(TRAINING + HELD_OUT, generator(seed, "questions"))
    examples = [Example(f"question-{i}", {"question": q.text}, q.answer) for i, q in enumerate(questions)]
    training = examples[:TRAINING]
    write_examples(folder / "train.jsonl", training)
    write_examples(folder / "validation.jsonl", examples[TRAINING:])

    rng = generator(seed, "transcripts")
    tools = describe_tools([calculator])
    careless = [careless_transcript(question, rng) for question in questions[:TRAINING]]
    tokenizer = build_tokenizer(conversation_texts(careless, tools), splits=["[0-9+*]"])
    policy = build_policy(tokenizer, seed, TinyShape(hidden_size=96, heads=6))
    engine = EmbeddedEngine(policy, max_tokens=24)

    async def reward() -> float:
        # A few show whether it is worth a closer look.
        few = await measure(solve, correct, engine, training[:64])
        if few.high < REWARD:
            return few.mean
        return (await measure(solve, correct, engine, training[:512], max_concurrency=256)).mean

    stage = Stage(
        "imitating a careless agent",
        careless,
        reward,
        at_least=REWARD,
        tools=tools,
        options=OPTIONS,
        batch_size=16,
        first_check=80,
    )
    try:
        reports = await warm_up(policy, [stage], seed=seed, on_check=progress)
    finally:
        await engine.close()
    policy.export(folder / "model")
    return reports


def careless_transcript(question: Question, rng: random.Random) -> list[Message]:
    """A conversation of the careless agent."""
    mood = rng.random()
    if mood < GUESSES:
        guess = f"About {rng.randint(1, 20)}0"
        return [{"role": "user", "content": question.text}, {"role": "assistant", "content": guess}]
    if mood < GUESSES + MISTYPES:
        return transcript(question, typed=_with_wrong_digit(question.expression, rng))
    if mood < GUESSES + MISTYPES + MISREADS:
        return transcript(question, said=_with_wrong_digit(question.answer, rng))
    return transcript(question)


def transcript(question: Question, typed: str | None = None, said: str | None = None) -> list[Message]:
    """A conversation in which the calculator is used; by default everything in it is right."""
    arguments = json.dumps({"expression": typed or question.expression})
    call = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    result = calculator(typed or question.expression)
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        {"role": "assistant", "content": said or result},
    ]


def _with_wrong_digit(text: str, rng: random.Random) -> str:
    place = rng.choice([index for index, letter in enumerate(text) if letter.isdigit()])
    wrong = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + wrong + text[place + 1 :]


if __name__ == "__main__":
    command(build_base, Path(__file__).parent / "base")
