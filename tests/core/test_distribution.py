"""How rewards are distributed: the best, its share, and counts."""

from hypothesis import given
from hypothesis import strategies as st

from etude.core.stats import Distribution
from etude.loop.metrics import reward_metrics
from etude.report.progress import shown_validation
from etude.report.words import figure_lines
from etude.store.figures import summary_of
from tests.report.histories import History, epoch, validation

PARTIAL = [0.2] * 41 + [0.0] * 20 + [0.1] * 3


def test_the_best_reward_its_share_and_the_counts_are_told():
    found = Distribution.of(PARTIAL)
    assert (found.n, found.best, found.best_count, found.full) == (64, 0.2, 41, 1.0)
    assert str(found) == "best 0.2 (41 of 64, none has 1)"
    assert found.shown_bars() == "20 × 0, 3 × 0.1, 41 × 0.2"
    assert str(Distribution.of([0.0, 1.0])) == "best 1 (1 of 2)"
    assert str(Distribution.of([0.0, 7.0])) == "best 7 (1 of 2)", "nobody knows how much there is"
    assert str(Distribution.of([0.0, 7.0], (0.0, 10.0))) == "best 7 (1 of 2, none has 10)"


def test_many_values_are_counted_by_ranges():
    found = Distribution.of([number / 100 for number in range(100)])
    assert len(found.bars) == 8 and {bar.number for bar in found.bars} <= {12, 13}
    assert found.shown_bars().startswith("13 × 0 … 0.1237, ")


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40))
def test_every_reward_is_counted_once(rewards):
    found = Distribution.of(rewards)
    assert sum(bar.number for bar in found.bars) == len(rewards)
    assert Distribution.model_validate(found.model_dump(mode="json")) == found


def test_summary_and_lines_say_that_no_answer_has_the_full_reward():
    metrics = reward_metrics(PARTIAL)
    reward = metrics.pop("avg_reward")
    entries = epoch(0, reward, **metrics), validation(0, reward, **metrics)
    summary = summary_of(History(run_id="r", epochs=entries[:1], validations=entries[1:]))
    assert summary["before"]["distribution"] == metrics["distribution"]
    lines = dict(figure_lines(summary))
    assert lines["distribution before"] == "best 0.2 (41 of 64, none has 1): 20 × 0, 3 × 0.1, 41 × 0.2"
    assert shown_validation(0, entries[1].metrics).endswith(", best 0.2 (41 of 64, none has 1)")
