"""Questions about two numbers."""

from __future__ import annotations

import random

TRAIN, HELD_OUT = 512, 256


def rows(random: random.Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Different pairs of numbers, with the larger one: to train on, and held out."""
    answers: dict[str, str] = {}
    while len(answers) < TRAIN + HELD_OUT:
        left, right = random.sample(range(10, 1000), 2)
        answers[f"Which number is larger, {left} or {right}?"] = str(max(left, right))
    questions = [{"question": question, "answer": answer} for question, answer in answers.items()]
    return questions[:TRAIN], questions[TRAIN:]
