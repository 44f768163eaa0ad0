"""Phases: the epochs, validations and warm-ups that episodes are collected for, and an epoch's examples."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Literal, cast, get_args

from etude.core.episode import Example
from etude.core.keys import shuffled_forever
from etude.engines.meter import Purpose, current_purpose, use_purpose


def examples_for_epoch(
    examples: Sequence[Example], count: int | None, epoch: int, seed: int
) -> list[Example]:
    """Return `count` examples for an epoch, from a seeded shuffle that cycles through the dataset.

    Each pass uses every example once, in a new order, and no epoch has an example twice. If `count` is None
    or covers the dataset, return all examples in their own order.
    """
    if count is None or count >= len(examples):
        return list(examples)
    order, put_off = shuffled_forever(len(examples), seed, "examples"), list[int]()
    for _ in range(epoch + 1):
        chosen, earlier = dict[int, None](), put_off
        put_off = []
        for index in chain(earlier, order):
            if index in chosen:
                put_off.append(index)
            else:
                chosen[index] = None
            if len(chosen) == count:
                break
    return [examples[index] for index in chosen]


Stage = Literal["train", "validation", "warm-up"]


def collecting_for(stage: Stage, number: int) -> AbstractContextManager[Purpose]:
    """Collect for an epoch (from 0) or a validation in the block, and in tasks started there.

    Calls outside of episodes are charged to it.
    """
    return use_purpose(Purpose(phase=phase_name(stage, number)))


def current_number(stage: Stage) -> int | None:
    """Return the epoch or validation of this stage that is being collected here; None outside of one."""
    part = current_part()
    return part[1] if part is not None and part[0] == stage else None


def current_part() -> tuple[Stage, int] | None:
    """Return the stage that is being collected for here, with its number; None outside of one."""
    name, _, number = current_purpose().phase.partition("/")
    if name not in get_args(Stage) or not number.isdecimal():
        return None
    return cast("Stage", name), int(number) - (name == "train")


def phase_name(stage: Stage, number: int, label: str = "") -> str:
    """Return the phase of the episodes of an epoch (`number` from 0) or a validation.

    The third epoch has `train/3`, and with a label `train/3-k2`.
    """
    name = f"train/{number + 1}" if stage == "train" else f"{stage}/{number}"
    if label in ("", name):
        return name
    return name + "-" + re.sub(r"[^\w~-]+", "-", label)  # `collection_phase` puts its number after a dot.


def collection_phase(phase: str, call: int) -> str:
    """Return the phase of the `call`-th collection (from 1) of one kind: `train/3`, `train/3.2`, …"""
    return phase if call == 1 else f"{phase}.{call}"
