"""Customers' messages and what is in them. Held-out ones speak of other products, partly in other words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TRAIN, HELD_OUT = 512, 128


@dataclass(frozen=True, slots=True)
class Words:
    """The building blocks of messages: products by name, and sentences by what they say."""

    products: tuple[str, ...]
    problems: dict[str, tuple[str, ...]]
    wishes: dict[str, tuple[str, ...]]
    orders: tuple[str, ...]
    greetings: tuple[str, ...]
    names: tuple[str, ...]


TO_LEARN = Words(
    products=(
        *("kettle", "desk lamp", "backpack", "toaster", "coffee grinder", "rain jacket", "bike lock"),
        *("keyboard", "desk chair", "water bottle", "blender", "pocket watch", "tent", "suitcase"),
        *("phone case", "hair dryer", "frying pan", "wall clock", "travel pillow", "garden hose"),
        *("tripod", "bread knife", "picture frame", "sewing machine", "yoga mat", "bookshelf"),
        *("soup pot", "sleeping bag", "camera bag", "coffee table", "ladder", "mirror"),
    ),
    problems={
        "damaged": (
            "The {product} arrived broken.",
            "The {product} has a crack in it.",
            "The {product} came with a big dent.",
            "When I opened the box, the {product} was in pieces.",
            "There is a deep scratch on the {product}.",
            "My {product} is bent and cannot be used.",
        ),
        "late": (
            "The {product} has not arrived yet.",
            "I am still waiting for the {product}.",
            "The {product} was due last week and is not here.",
            "Where is the {product}? It should have come on Friday.",
            "Two weeks have gone by without any sign of the {product}.",
            "My {product} was promised for Monday and has not come.",
        ),
        "wrong item": (
            "I ordered a {product} and got a {other}.",
            "You sent me a {other} and not the {product} that I paid for.",
            "There was a {other} in the box, and I had bought a {product}.",
            "Instead of the {product} I received a {other}.",
            "My {product} turned out to be a {other}.",
            "I was sent a {other}, but I wanted a {product}.",
        ),
        "missing part": (
            "The {product} came without its screws.",
            "A part of the {product} is not in the box.",
            "The {product} is here, but one piece is missing.",
            "The box of the {product} did not hold all of its parts.",
            "I cannot put the {product} together, because a part is missing.",
            "The {product} was delivered without its cover.",
        ),
    },
    wishes={
        "refund": (
            "I want my money back.",
            "Please refund me.",
            "Pay me back, please.",
            "I would like a refund.",
        ),
        "replacement": (
            "Please send me a new one.",
            "Can you replace it?",
            "I would like you to send another one.",
            "I need a replacement.",
        ),
        "answer": (
            "What should I do now?",
            "Can you tell me what happened?",
            "Please let me know how this goes on.",
            "Could somebody explain this to me?",
        ),
    },
    orders=(
        "Order {order}.",
        "My order number is {order}.",
        "(order no. {order})",
        "It is about order {order}.",
    ),
    greetings=("Hello.", "Hi!", "Dear team!", "Good morning."),
    names=("Mia", "Tom", "Ana", "Lee", "Kim", "Ravi", "Zoe", "Sam", "Olga", "Ben"),
)
NEW = Words(
    products=(
        *("teapot", "floor lamp", "handbag", "waffle iron", "wool sweater", "bike pump", "monitor"),
        *("garden chair", "lunch box", "mixer", "beach towel", "wallet", "laptop bag", "cutting board"),
    ),
    problems={
        "damaged": ("Sadly the {product} was smashed.", "The {product} has a hole in it."),
        "late": ("I have been waiting for my {product} for ten days.", "My {product} is still not here."),
        "wrong item": (
            "I bought a {product}, but a {other} was delivered.",
            "What came was a {other}, and not my {product}.",
        ),
        "missing part": ("One of the parts of the {product} is missing.", "The {product} lacks a part."),
    },
    wishes={
        "refund": ("Please give me my money back.", "I am asking for a refund."),
        "replacement": ("Please send a replacement.", "Send me a new one, please."),
        "answer": ("What happens next?", "Please tell me what to do."),
    },
    orders=("Order number {order}.", "This is about my order {order}."),
    greetings=("Hello there.", "Good evening."),
    names=("Nora", "Paul", "Ines", "Max"),
)
"""Never trained on."""
HELD_OUT_WORDS = Words(
    products=NEW.products,
    problems={problem: TO_LEARN.problems[problem] + new for problem, new in NEW.problems.items()},
    wishes={wish: TO_LEARN.wishes[wish] + new for wish, new in NEW.wishes.items()},
    orders=TO_LEARN.orders + NEW.orders,
    greetings=TO_LEARN.greetings + NEW.greetings,
    names=NEW.names,
)


def rows(random: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Different messages with their fields: to train on, and held out."""
    return _rows(random, TO_LEARN, TRAIN), _rows(random, HELD_OUT_WORDS, HELD_OUT)


def _rows(random: random.Random, words: Words, count: int) -> list[dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < count:
        message, ticket = _message(random, words)
        answers[message] = ticket
    return [{"message": message, "answer": ticket} for message, ticket in answers.items()]


def _message(random: random.Random, words: Words) -> tuple[str, dict[str, Any]]:
    product, other = random.sample(words.products, 2)
    problem, wants = random.choice([*words.problems]), random.choice([*words.wishes])
    order = random.randint(10_000, 99_999)
    sentences = [
        random.choice(words.problems[problem]).format(product=product, other=other),
        random.choice(words.wishes[wants]),
    ]
    sentences.insert(random.randint(0, 2), random.choice(words.orders).format(order=order))
    if random.random() < 0.5:
        sentences.insert(0, random.choice(words.greetings))
    if random.random() < 0.5:
        sentences.append(random.choice(words.names))
    return " ".join(sentences), {"order": order, "product": product, "problem": problem, "wants": wants}
