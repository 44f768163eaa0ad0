from __future__ import annotations

import functools

import pytest

from etude.core.errors import RequestError
from etude.rollout.workflow import (
    as_workflow,
    function,
    workflow,
)


async def play(example, episode):
    return "async"


def play_plain(example, episode):
    return "plain"


class Agent:
    async def __call__(self, example, episode):
        return "object"


def test_the_decorator_makes_a_workflow_and_leaves_the_function_callable() -> None:
    bare = workflow(play_plain)
    named = workflow(name="solver", timeout=3)(play_plain)
    assert (bare.name, bare.timeout) == ("play_plain", None)
    assert (named.name, named.timeout) == ("solver", 3)
    assert bare(None, None) == "plain"
    assert bare.where.startswith(__file__)


@pytest.mark.parametrize(
    ("fn", "is_async"),
    [
        (play, True),
        (play_plain, False),
        (Agent(), True),
        (functools.partial(play), True),
        (function(play), True),
    ],
)
def test_async_functions_are_told_from_plain_ones(fn, is_async: bool) -> None:
    assert as_workflow(fn).is_async is is_async


def test_a_workflow_stays_itself() -> None:
    decorated = workflow(play)
    assert as_workflow(decorated) is decorated
    assert as_workflow(decorated, timeout=5).timeout == 5
    assert decorated.timeout is None


@pytest.mark.parametrize("thing", ["play", 3, None, Agent])
def test_what_is_no_function_is_refused(thing: object) -> None:
    for candidate in (thing, workflow(name="x")(thing)):
        with pytest.raises(RequestError, match="must be a function of an example and an episode"):
            as_workflow(candidate)


def test_a_function_that_takes_too_little_is_refused_with_its_place() -> None:
    @workflow
    def one(example):
        return example

    line = one.fn.__code__.co_firstlineno
    with pytest.raises(
        RequestError, match=rf"test_workflow\.py:{line}: workflow 'one' is called with \(example, "
    ):
        as_workflow(one)


def test_a_function_that_needs_more_is_refused_unless_it_is_given() -> None:
    @workflow
    def three(example, episode, strategy):
        return strategy

    with pytest.raises(RequestError, match="missing a required argument: 'strategy'"):
        three.check(complete=True)
    as_workflow(three, arguments={"strategy": "fast"}).check(complete=True)
    with pytest.raises(RequestError, match="unexpected keyword argument 'stratgy'"):
        as_workflow(three, arguments={"stratgy": "fast"})
