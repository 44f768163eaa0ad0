"""Writing the files of a new project."""

from __future__ import annotations

import json
import random
from pathlib import Path

from etude.core.keys import generator
from etude.store.files import write_new_files

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Small enough for a laptop, and trained to chat."""

TRAIN, HELD_OUT = 64, 64

_FILES = Path(__file__).parent / "starter_files"
_SIGNS = ("+", "-", "*")


def write_starter(folder: Path, model: str = MODEL) -> list[Path]:
    """Write agent.py, train.jsonl, validation.jsonl and config.yml into `folder`; what was written.

    Raises RequestError when one of them is there already, StoreError when they cannot be written.
    """
    questions = _questions(TRAIN + HELD_OUT, generator(0, "starter"))
    config = (_FILES / "config.yml.txt").read_text(encoding="utf-8").format(model=json.dumps(model))
    contents = {
        "agent.py": (_FILES / "agent.py.txt").read_text(encoding="utf-8"),
        "train.jsonl": _lines(questions[:TRAIN]),
        "validation.jsonl": _lines(questions[TRAIN:]),
        "config.yml": config,
    }
    return write_new_files(folder, contents)


def _questions(count: int, random: random.Random) -> list[dict[str, str]]:
    """Different sums of small numbers, with their answers."""
    answers: dict[str, str] = {}
    while len(answers) < count:
        left, right, sign = random.randint(2, 20), random.randint(2, 9), random.choice(_SIGNS)
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        answers[f"What is {left} {sign} {right}?"] = str(value)
    return [{"question": question, "answer": answer} for question, answer in answers.items()]


def _lines(questions: list[dict[str, str]]) -> str:
    rows = [{"id": f"q{number}", **question} for number, question in enumerate(questions)]
    return "".join(json.dumps(row) + "\n" for row in rows)
