"""Clients that are installed by themselves work unchanged: those of npm, and Inspect AI.

npm install --prefix tests/clients/node && pytest -m node
python3 -m venv V && V/bin/pip install inspect-ai openai && ETUDE_TEST_INSPECT=V/bin/python pytest -m inspect
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.clients.drive import OPTIONAL, Feature, client_of
from tests.clients.matrix import SIDES, Outcomes, features, is_installed, run_matrix
from tests.clients.page import PAGE, is_extended, is_recorded, section

HINTS = {
    "npm": "npm install --prefix tests/clients/node",
    "venv": "ETUDE_TEST_INSPECT names the Python of an environment with inspect-ai",
}
MARKS = {"npm": pytest.mark.node, "venv": pytest.mark.inspect}


def marks(module: str) -> list[pytest.MarkDecorator]:
    registry = client_of(module).registry
    return [MARKS[registry], pytest.mark.skipif(not is_installed(module), reason=HINTS[registry])]


CASES = [pytest.param(*case, marks=marks(case[0]), id=f"{case[0]}-{case[1]}") for case in features(OPTIONAL)]


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcomes of a client's features; each client is driven once."""
    return functools.cache(lambda module: run_matrix(tmp_path_factory.mktemp("optional"), [module]))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("module", "name", "feature"), CASES)
def test_it_works(outcomes_of: Any, module: str, name: str, feature: Feature, side: str) -> None:
    outcome = outcomes_of(module)[module, name, side]
    assert outcome.error is None, outcome.error
    if side == "endpoint":
        assert len(outcome.calls) >= feature.calls
        assert all(map(is_recorded, outcome.calls))
        assert is_extended(outcome.calls) or not feature.extends


@pytest.mark.parametrize("module", [pytest.param(module, marks=marks(module)) for module in OPTIONAL])
def test_the_page_is_up_to_date(outcomes_of: Any, module: str) -> None:
    outcomes: Outcomes = outcomes_of(module)
    assert section(module, outcomes) in PAGE.read_text(encoding="utf-8"), "type: make docs"
