"""Problems in words, and the sum that solves each."""

from __future__ import annotations

import random

TRAIN, HELD_OUT = 384, 128

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea")
THINGS = ("apples", "books", "cards", "coins", "marbles", "pens", "shells", "stamps")
BOXES = ("bags", "boxes", "crates", "jars")

PROBLEMS = {
    "{name} has {some} {things} and buys {more} more. How many does {name} have?": "{some} + {more}",
    "{name} had {many} {things} and lost {some}. How many are left?": "{many} - {some}",
    "There are {few} {boxes} with {some} {things} each. How many {things} are there?": "{few} * {some}",
    "{name} has {some} {things}. {other} has {few} times as many. How many does {other} have?": (
        "{few} * {some}"
    ),
    "{name} has {many} {things}, {some} more than {other}. How many does {other} have?": "{many} - {some}",
    "{name} buys {few} {boxes} of {some} {things} and gives {less} away. How many are left?": (
        "{few} * {some} - {less}"
    ),
    "{name} has {more} {things} and gets {few} {boxes} of {some}. How many does {name} have?": (
        "{more} + {few} * {some}"
    ),
    "{name} had {many} {things}, lost {some} and found {less}. How many does {name} have?": (
        "{many} - {some} + {less}"
    ),
}


def rows(random: random.Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Different problems: to train on, and held out."""
    answers: dict[str, str] = {}
    while len(answers) < TRAIN + HELD_OUT:
        name, other = random.sample(NAMES, 2)
        words = {"name": name, "other": other, "things": random.choice(THINGS), "boxes": random.choice(BOXES)}
        ranges = {"few": (3, 29), "less": (5, 30), "some": (12, 99), "more": (12, 99), "many": (101, 999)}
        numbers = {size: random.randint(*range) for size, range in ranges.items()}
        problem, expression = random.choice([*PROBLEMS.items()])
        answers[problem.format(**words, **numbers)] = expression.format(**numbers)
    problems = [{"question": question, "answer": answer} for question, answer in answers.items()]
    return problems[:TRAIN], problems[TRAIN:]
