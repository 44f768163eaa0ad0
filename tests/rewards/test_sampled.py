"""Figures of what the trained model said."""

import math
import random

import pytest

from etude.core.call import Call, ChatRequest, Completion, Sampling, Usage
from etude.core.episode import SIMULATED_USER, EpisodeRecord, Example
from etude.rewards.collections import Sampled


def said(text, logprobs=None, *, model="policy", function="play", temperature=1.0):
    """A call that was answered so."""
    message, tokens = {"role": "assistant", "content": text}, len(text)
    request = ChatRequest(messages=(), sampling=Sampling(temperature=temperature))
    completion = Completion(message, logprobs=logprobs, usage=Usage(3, tokens))
    return Call(0, function, model, request, completion)


def episode(example, generation, *calls, failure=None):
    name = f"train/1/{example}/{generation}"
    return EpisodeRecord(name, Example(example), generation, calls, failure=failure)


def metrics(*episodes):
    sampled = Sampled()
    for each in episodes:
        sampled.saw(each, "policy")
    return sampled.metrics()


def test_lengths_and_entropy_are_of_the_tokens_that_the_model_sampled():
    figures = metrics(
        episode("a", 0, said("ab", (-1.0, -3.0)), said("x", (-50.0,), model="judge")),
        episode("a", 1, said("abcd", (-0.5, -0.5, -0.5, -0.5))),
        episode("a", 2, said("user", (-9.0,) * 4, function=SIMULATED_USER)),
        episode("a", 3, said("greedy", (-9.0,) * 6, temperature=0.0)),
    )
    assert figures["answer_tokens"] == (2 + 4 + 6) / 3
    assert figures["sampled_entropy"] == (1.0 + 3.0 + 4 * 0.5) / 6


def test_the_entropy_is_that_of_the_distribution_sampled_from():
    chances = [0.5, 0.3, 0.15, 0.05]
    drawn = random.Random(0).choices(chances, weights=chances, k=20_000)
    figure = metrics(episode("a", 0, said("x", tuple(map(math.log, drawn)))))["sampled_entropy"]
    assert figure == pytest.approx(-sum(chance * math.log(chance) for chance in chances), abs=0.02)


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        (["same", "same", "same"], 1.0),
        (["one", "two", "three"], 0.0),
        (["one", "one", "two"], 0.5),
        (["alone"], None),
    ],
)
def test_repeated_attempts_are_counted_within_an_example(groups, share):
    others = [episode("b", 0, said("same")), episode("c", 0)]
    own = [episode("a", number, said(text)) for number, text in enumerate(groups)]
    assert metrics(*own, *others)["repeated_share"] == share
