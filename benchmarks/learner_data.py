"""Data of the learner's benchmark: random tokens in the shapes that agents make."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from etude.core.sample import Sample, Turn
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

MODELS = {
    "0.13M": TinyShape(max_context=8192),
    "0.9M": TinyShape(hidden_size=128, layers=4, heads=4, intermediate_size=384, max_context=8192),
}
"""The demos' Llama, and one with twice its width and depth."""

_VOCABULARY = 512


def model(name: str) -> Policy:
    """One of MODELS with random weights, and a vocabulary of 512."""
    texts = [f"{left} plus {right} is {left + right}." for left in range(99) for right in range(99)]
    return build_policy(build_tokenizer(texts, vocab_size=_VOCABULARY), 0, MODELS[name])


Range = tuple[int, int]
"""The least and the greatest number of tokens."""


def short(choose: random.Random) -> list[Sample]:
    """8 prompts of about 48 tokens, 8 completions of about 11 each."""
    return groups(choose, 8, prompt=(40, 56), completion=(4, 18))


def long(choose: random.Random) -> list[Sample]:
    """One prompt of 1024 tokens, 8 completions of 64."""
    return groups(choose, 1, prompt=(1024, 1024), completion=(64, 64))


def turns(choose: random.Random) -> list[Sample]:
    """8 conversations of 6 turns after a prompt of 210 tokens: 48 calls, each a sequence of its own.

    A turn is an answer of about 40 tokens, and about 20 of what a tool says to it.
    """
    return conversations(choose, prompt=210, answer=(20, 60), told=(10, 30))


def agents(choose: random.Random) -> list[Sample]:
    """4 conversations of an agent with tools, of 4 to 8 turns, which end at 2k to 8k tokens.

    After a prompt of 700 tokens, answers of 30 to 120 and results of tools of all lengths; each call is a
    sequence of its own.
    """
    start, found = _tokens(choose, 700), []
    for _ in range(4):
        count, end = choose.randint(4, 8), choose.randint(2000, 8000)
        answers = [choose.randint(30, 120) for _ in range(count)]
        shares = [choose.random() for _ in range(count - 1)]
        results = [int((end - len(start) - sum(answers)) * share / sum(shares)) for share in shares]
        context = start
        for answer, result in zip(answers, [*results, 0], strict=True):
            found.append(_sequence(choose, context, answer))
            context = [*found[-1].ids, *_tokens(choose, result)]
    return found


def groups(choose: random.Random, count: int, *, prompt: Range, completion: Range) -> list[Sample]:
    """So many prompts, with 8 completions each."""
    prompts = [_tokens(choose, choose.randint(*prompt)) for _ in range(count)]
    return [_sequence(choose, one, choose.randint(*completion)) for one in prompts for _ in range(8)]


def conversations(
    choose: random.Random, *, prompt: int, answer: Range, told: Range, count: int = 8, turns: int = 6
) -> list[Sample]:
    """All calls of `count` conversations after one prompt, each a sequence of its own."""
    start, found = _tokens(choose, prompt), []
    for _ in range(count):
        context = start
        for _ in range(turns):
            found.append(_sequence(choose, context, choose.randint(*answer)))
            context = [*found[-1].ids, *_tokens(choose, choose.randint(*told))]
    return found


LONG: dict[str, Callable[[random.Random], list[Sample]]] = {"agents": agents}
"""Those of `--long`."""
SHAPES: dict[str, Callable[[random.Random], list[Sample]]] = {
    "short": short,
    "long": long,
    "turns": turns,
}


def _tokens(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(7, 260) for _ in range(count)]


def _sequence(choose: random.Random, prompt: Sequence[int], count: int) -> Sample:
    """A completion of `count` tokens, all of which are trained on."""
    start, advantage = len(prompt), choose.choice([-1, 1]) * choose.uniform(0.2, 2)
    return Sample(
        ids=(*prompt, *_tokens(choose, count)),
        mask=(False,) * start + (True,) * count,
        advantages=(0.0,) * start + (advantage,) * count,
        # What an untrained model says of a token, so that the ratios are near 1.
        logprobs=(0.0,) * start + (-6.2,) * count,
        turns=(Turn(start, start + count),),
    )
