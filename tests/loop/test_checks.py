"""How old what is trained on may be."""

from __future__ import annotations

from etude.loop.training_data import age_of


def test_age_is_counted_in_versions_that_were_made_whatever_their_numbers():
    assert [age_of(number, [3, 10, 12]) for number in (0, 3, 5, 10, 12)] == [3, 2, 2, 1, 0]
