"""Agent frameworks work unchanged, at an episode's endpoint and at a server."""

from __future__ import annotations

import pytest

from tests.clients.drive import Feature
from tests.clients.matrix import SIDES, Outcomes, features, run_matrix
from tests.clients.page import PAGE, is_extended, is_recorded, render

CASES = list(features())
IDS = [f"{module}-{name}" for module, name, _ in CASES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_matrix(tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("module", "name", "feature"), CASES, ids=IDS)
def test_it_works(outcomes: Outcomes, module: str, name: str, feature: Feature, side: str) -> None:
    assert outcomes[module, name, side].error is None, outcomes[module, name, side].error


@pytest.mark.parametrize(("module", "name", "feature"), CASES, ids=IDS)
def test_every_call_is_recorded_and_a_conversation_extended(
    outcomes: Outcomes, module: str, name: str, feature: Feature
) -> None:
    # A call that was refused is recorded with its error.
    calls = [call for call in outcomes[module, name, "endpoint"].calls if call.error is None]
    assert len(calls) >= feature.calls
    assert all(map(is_recorded, calls))
    assert is_extended(calls) or not feature.extends


def test_the_page_is_up_to_date(outcomes: Outcomes) -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == render(outcomes), "docs/compatibility.md is out of date; type: make docs"
