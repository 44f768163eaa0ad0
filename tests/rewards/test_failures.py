"""The error budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.errors import ErrorBudgetExceeded
from etude.rewards.evaluation import ErrorBudget


def spend(budget: ErrorBudget, episodes: int, scores: int) -> None:
    for number in range(episodes):
        budget.add("timeout", f"train/1/q{number}/0", "no output within 300 s")
    for number in range(scores):
        budget.add("score:correct", f"train/1/s{number}/0", "the evaluator returned None")


def test_over_the_budget_the_error_has_counts_by_kind_and_the_first_examples() -> None:
    with pytest.raises(ErrorBudgetExceeded) as caught:
        spend(ErrorBudget(0.4, 10), episodes=5, scores=0)
    assert str(caught.value) == (
        "5 of 10 episodes failed, more than the error budget of 40 % allows:\n"
        "  timeout: 5\n"
        "    train/1/q0/0: no output within 300 s\n"
        "    train/1/q1/0: no output within 300 s\n"
        "    train/1/q2/0: no output within 300 s\n"
        "All other episodes and scores are kept. Mend the cause and resume the run, or raise the budget."
    )


@given(st.floats(0, 1), st.integers(1, 30), st.data())
def test_an_early_stop_is_never_hasty(share: float, episodes: int, data: st.DataObject) -> None:
    """A run that is stopped early would have been stopped at its end too."""
    failed = data.draw(st.integers(0, episodes))
    unscored = data.draw(st.integers(0, episodes - failed))
    at_the_end = failed > share * episodes or unscored > share * (episodes - failed)
    budget = ErrorBudget(share, episodes)
    try:
        spend(budget, failed, unscored)
        budget.check(budget.episodes - budget.failed_episodes)
    except ErrorBudgetExceeded:
        assert at_the_end
    else:
        assert not at_the_end
