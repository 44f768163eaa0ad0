"""The `openai` package of npm works unchanged.

npm install --prefix tests/clients/node && pytest -m node
"""

from __future__ import annotations

import pytest

from tests.clients.drive import Feature
from tests.clients.matrix import NODE, SIDES, Outcomes, features, run_matrix
from tests.clients.page import is_extended, is_recorded

MODULES = ("openai_node",)
CASES = [(name, feature) for _, name, feature in features(MODULES)]

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(
        not (NODE / "node_modules").is_dir(), reason="npm install --prefix tests/clients/node"
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_matrix(tmp_path_factory.mktemp("node"), MODULES)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "feature"), CASES, ids=[name for name, _ in CASES])
def test_it_works(outcomes: Outcomes, name: str, feature: Feature, side: str) -> None:
    outcome = outcomes["openai_node", name, side]
    assert outcome.error is None, outcome.error
    if side == "endpoint":
        assert len(outcome.calls) >= feature.calls
        assert all(map(is_recorded, outcome.calls))
        assert is_extended(outcome.calls) or not feature.extends
