"""The task: notes about orders, each written in one of several ways, and what is to be read from them."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea")
ITEMS = ("bowls", "chairs", "cups", "lamps", "plates", "spoons", "tables", "vases")
COLOURS = ("black", "blue", "green", "red", "white", "yellow")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

NOTES = (
    "{buyer} sends {recipient} {count} {colour} {item} on {day}.",
    "On {day} {recipient} gets {count} {colour} {item} from {buyer}.",
    "{count} {item}, {colour}, for {recipient}. {day}. {buyer} pays.",
    "For {recipient}, paid by {buyer}: {colour} {item}, {count} of them, {day}.",
)
"""Who buys and who receives can only be told by how the note is written."""


Word = Annotated[str, Field(max_length=12)]
"""Bounded, as the number is: a young policy would ramble on."""


class Order(BaseModel):
    """The fields of an order: the schema that every answer keeps to."""

    model_config = ConfigDict(extra="forbid")

    buyer: Word
    recipient: Word
    item: Word
    colour: Literal["black", "blue", "green", "red", "white", "yellow"]
    count: int = Field(ge=1, le=9)
    day: Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]


def draw_order(rng: random.Random) -> Order:
    """An order of one person for another."""
    buyer, recipient = rng.sample(NAMES, 2)
    return Order(
        buyer=buyer,
        recipient=recipient,
        item=rng.choice(ITEMS),
        colour=rng.choice(COLOURS),
        count=rng.randint(2, 9),
        day=rng.choice(DAYS),
    )


def draw_notes(count: int, rng: random.Random) -> dict[str, Order]:
    """`count` different notes, each with its order."""
    notes: dict[str, Order] = {}
    while len(notes) < count:
        order = draw_order(rng)
        notes[rng.choice(NOTES).format(**order.model_dump())] = order
    return notes
