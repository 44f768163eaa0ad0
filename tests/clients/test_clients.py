"""Agent frameworks work unchanged, at an episode's endpoint and at a server.

Two in every run, others in `make test-all`; `npm install --prefix tests/clients/node && pytest -m node`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from etude.core.call import Call, Completion, continues
from tests.clients.drive import MODULES, OPTIONAL, Feature
from tests.clients.matrix import SIDES, USUAL, features, is_installed, run_matrix

OTHERS = tuple(module for module in MODULES if module not in USUAL)
TOGETHER = {module: group for group in (USUAL, OTHERS) for module in group}
"""Clients that share a model and a server; each of the optional ones is driven by itself."""

HINT = "npm install --prefix tests/clients/node"


def marks(module: str) -> list[pytest.MarkDecorator]:
    if module in MODULES:
        return [] if module in USUAL else [pytest.mark.slow]
    return [pytest.mark.node, pytest.mark.skipif(not is_installed(module), reason=HINT)]


CASES = [
    pytest.param(*case, marks=marks(case[0]), id=f"{case[0]}-{case[1]}")
    for case in features((*MODULES, *OPTIONAL))
]


@pytest.fixture(scope="module")
def get_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcomes of a client's features; each client is driven once."""
    driven = functools.cache(lambda modules: run_matrix(tmp_path_factory.mktemp("clients"), modules))
    return lambda module: driven(TOGETHER.get(module, (module,)))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("module", "name", "feature"), CASES)
def test_it_works(get_outcomes: Any, module: str, name: str, feature: Feature, side: str) -> None:
    outcome = get_outcomes(module)[module, name, side]
    assert outcome.error is None, outcome.error


@pytest.mark.parametrize(("module", "name", "feature"), CASES)
def test_every_call_is_recorded_and_a_conversation_extended(
    get_outcomes: Any, module: str, name: str, feature: Feature
) -> None:
    # A call that was refused is recorded with its error.
    calls = [call for call in get_outcomes(module)[module, name, "endpoint"].calls if call.error is None]
    assert len(calls) >= feature.calls
    assert all(map(is_recorded, calls))
    assert is_extended(calls) or not feature.extends


def is_recorded(call: Call) -> bool:
    """Whether a call has the token ids and logprobs of its answer."""
    answer = call.completion
    if answer is None or not answer.prompt_ids or not answer.completion_ids or answer.logprobs is None:
        return False
    return len(answer.logprobs) == len(answer.completion_ids)


def is_extended(calls: Sequence[Call]) -> bool:
    """Whether calls go on from earlier ones, and all that do begin with the earlier tokens."""
    pairs = [
        (earlier.completion, later.completion)
        for index, later in enumerate(calls)
        for earlier in calls[:index]
        if continues(later.request.messages, earlier)
    ]
    return bool(pairs) and all(map(begins_with, pairs))


def begins_with(pair: tuple[Completion | None, Completion | None]) -> bool:
    """Whether the prompt of the later completion begins with all tokens of the earlier one."""
    earlier, later = pair
    assert earlier is not None and later is not None
    start = (*(earlier.prompt_ids or ()), *(earlier.completion_ids or ()))
    return not later.drifted and (later.prompt_ids or ())[: len(start)] == start
