from __future__ import annotations

import functools
from pathlib import Path

import pytest

from etude.config import registry
from etude.config.import_path import make_importable
from etude.core.errors import RequestError
from etude.rollout.workflow import (
    FunctionWorkflowConfig,
    Workflow,
    as_workflow,
    function,
    function_workflow,
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


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(RequestError, match="timeout must be more than 0 s"):
        as_workflow(workflow(timeout=0)(play))


def test_functions_without_a_signature_are_taken_as_they_are() -> None:
    assert as_workflow(max).name == "max"


async def test_the_function_component_imports_what_the_config_names(tmp_path: Path) -> None:
    (tmp_path / "my_own_agent.py").write_text(
        "import etude.rollout.workflow as w\n@w.workflow\nasync def play(example, episode, depth): ...\n"
    )
    make_importable(tmp_path)
    config = FunctionWorkflowConfig(function="my_own_agent:play", timeout=9, arguments={"depth": 2})
    built = [component async for component in function_workflow(config, None)]
    assert isinstance(built[0], Workflow)
    assert (built[0].name, built[0].timeout, built[0].arguments) == ("play", 9, {"depth": 2})
    registration = registry.of_object("workflow", function_workflow)
    assert registration is not None and registration.name == "function"


async def test_the_function_component_says_what_cannot_be_imported() -> None:
    config = FunctionWorkflowConfig(function="no_such_module_here:play")
    with pytest.raises(RequestError, match="no_such_module_here"):
        await anext(function_workflow(config, None))
