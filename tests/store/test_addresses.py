"""How addresses are in many processes together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.store.addresses import AddressRow, OtherRows

URLS = ("http://a", "http://b", "http://c")
WORST_FIRST = ("aside", "trial", "draining", "drained", "up")

numbers = st.integers(0, 5)
rows = st.builds(AddressRow, st.sampled_from(WORST_FIRST), st.just(""), numbers, numbers, numbers, numbers)
reports = st.lists(
    st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from(URLS), rows, max_size=3)), max_size=12
)


@given(reports, rows)
def test_what_processes_told_last_is_added_up_and_the_worst_state_counts(told, own):
    others, last = OtherRows(), {}
    for process, report in told:
        others.note(process, report)
        last[process] = report
    for url in URLS:
        all_rows = [own, *(report[url] for report in last.values() if url in report)]
        together = others.with_own(url, own)
        assert together.counts == tuple(
            sum(column) for column in zip(*(row.counts for row in all_rows), strict=True)
        )
        states = {row.state for row in all_rows}
        is_half = states == {"drained", "up"}  # Those that are up may begin calls there.
        assert together.state == ("draining" if is_half else min(states, key=WORST_FIRST.index))


def test_the_reason_is_that_of_the_worst():
    others = OtherRows()
    others.note("runner", {"http://a": AddressRow("aside", "no answer", answered=3)})
    assert others.with_own("http://a", AddressRow("draining", "asked to")).shown == "aside: no answer"
    others.note("runner", {})
    assert others.with_own("http://a", AddressRow("draining", "asked to")).shown == "draining: asked to"
