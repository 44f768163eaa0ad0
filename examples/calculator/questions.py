"""The questions of `mcp.yml`, and the careless agent that its model imitates first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import etude
from etude.core.keys import generator
from etude.rollout.tools import describe_tools

from base import HELD_OUT, TRAINING, careless_transcript
from task import Question, calculator, draw_questions

TRANSCRIPTS = 12_000


def questions(held_out: bool = False) -> Iterator[dict[str, str]]:
    """The rows of the dataset: those that are trained on, or those that are held out."""
    drawn = draw_questions(TRAINING + HELD_OUT, generator(0, "questions"))
    for question in drawn[TRAINING:] if held_out else drawn[:TRAINING]:
        yield {"id": question.expression, "question": question.text, "answer": question.answer}


def careless(examples: Sequence[etude.Example], seed: int) -> Iterator[dict[str, Any]]:
    """Conversations of an agent that often guesses instead of using the calculator, mistypes or misreads."""
    rng = generator(seed, "transcripts")
    for _ in range(TRANSCRIPTS):
        left, word, right = rng.choice(examples).inputs["question"][:-1].split()[2:]
        messages = careless_transcript(Question(int(left), word, int(right)), rng)
        yield {"messages": messages, "tools": describe_tools([calculator])}
