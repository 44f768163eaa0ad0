"""The inputs that workflows and evaluators read, by their source."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from etude.preflight.own_code import inputs_read
from etude.protocols.workflow import ProtocolWorkflow


def names(fn: Any) -> list[tuple[str, bool]]:
    return [(read.name, read.is_certain) for read in inputs_read(fn)]


async def plain(example, episode):
    async with nullcontext():
        reply = await episode.chat([{"role": "user", "content": f"{example.inputs['question']}?"}])
    return reply.text


def by_other_names(sample, episode):
    inputs: dict = sample.inputs
    same = sample
    return inputs["question"], same.inputs["unit"], inputs.get("hint")


def prompt(of, task):
    return of["question"] + worded(task, "name")


def worded(task, key):
    return task.inputs["style"] + task.inputs[key]


def handed_on(example, episode):
    return prompt(example.inputs, example)


def perhaps(example, episode):
    if episode:
        return example.inputs["one"]
    try:
        return example.inputs["two"]
    except KeyError:
        return [example.inputs["three"] for _ in range(3)]


def asked_for(example, episode):
    return f"{example.inputs['hint']}!" if "hint" in example.inputs else ""


def written(example, episode):
    example.inputs["question"] = 1
    other = {"inputs": 1}
    return other["inputs"], episode.inputs["question"]


def set_before(example, episode):
    example.inputs["hint"] = example.inputs["question"]
    return example.inputs["hint"]


def suppressed(example, episode):
    with suppress(KeyError):
        return example.inputs["question"]


def parsed(example, episode):
    inputs = example.inputs
    inputs = json.loads(inputs["question"])
    return inputs["of_the_text"]


def returned_before(example, episode):
    if example.inputs["kind"] == "text":
        return example.inputs["text"]
    return example.inputs["question"]


def recursive(example, episode):
    return recursive(example, example.inputs["question"])


class Agent:
    async def __call__(self, example, episode):
        return example.inputs["question"]

    def method(self, example, episode):
        return example.inputs["question"]


SURE = [("question", True)]


@pytest.mark.parametrize(
    ("fn", "reads"),
    [
        (plain, SURE),
        (by_other_names, [("question", True), ("unit", True), ("hint", False)]),
        (handed_on, [("question", True), ("style", True)]),
        (perhaps, [("one", False), ("two", False), ("three", False)]),
        (asked_for, []),
        (written, []),
        (set_before, SURE),
        (suppressed, [("question", False)]),
        (parsed, SURE),
        (returned_before, [("kind", False), ("text", False), ("question", False)]),
        (recursive, SURE),
        (Agent(), SURE),
        (Agent().method, SURE),
        (functools.partial(plain), SURE),
        (functools.lru_cache(plain), SURE),
        (len, []),
        (lambda example, episode: example.inputs["question"], []),
        (ProtocolWorkflow.__call__, []),
    ],
)
def test_the_inputs_that_a_function_reads(fn, reads):
    assert names(fn) == reads
