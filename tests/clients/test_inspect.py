"""Inspect AI works unchanged.

python3 -m venv V && V/bin/pip install inspect-ai openai && ETUDE_TEST_INSPECT=V/bin/python pytest -m inspect
"""

from __future__ import annotations

import pytest

from tests.clients.drive import OPTIONAL, Feature, client_of
from tests.clients.matrix import SIDES, Outcomes, features, is_installed, run_matrix
from tests.clients.page import PAGE, is_extended, is_recorded, section

MODULES = tuple(module for module in OPTIONAL if client_of(module).registry == "venv")
CASES = list(features(MODULES))

pytestmark = [
    pytest.mark.inspect,
    pytest.mark.skipif(not all(map(is_installed, MODULES)), reason="npm install --prefix tests/clients/node"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_matrix(tmp_path_factory.mktemp("inspect"), MODULES)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("module", "name", "feature"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_it_works(outcomes: Outcomes, module: str, name: str, feature: Feature, side: str) -> None:
    outcome = outcomes[module, name, side]
    assert outcome.error is None, outcome.error
    if side == "endpoint":
        assert len(outcome.calls) >= feature.calls
        assert all(map(is_recorded, outcome.calls))
        assert is_extended(outcome.calls) or not feature.extends


@pytest.mark.parametrize("module", MODULES)
def test_the_page_is_up_to_date(outcomes: Outcomes, module: str) -> None:
    assert section(module, outcomes) in PAGE.read_text(encoding="utf-8"), "type: make docs"
