"""Decisions: the scales, and how they are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.protocols import SCALES

EXPECTED = {
    "accept_reject": [("reject", -1), ("accept", 1)],
    "accept_reject_neither": [("reject", -1), ("neither", 0), ("accept", 1)],
    "likert_scale_4": [("strongly disagree", -1), ("disagree", -0.5), ("agree", 0.5), ("strongly agree", 1)],
    "likert_scale_5": [
        ("strongly disagree", -1),
        ("disagree", -0.5),
        ("neither agree nor disagree", 0),
        ("agree", 0.5),
        ("strongly agree", 1),
    ],
    "likert_scale_6": [
        ("strongly disagree", -1),
        ("disagree", -0.667),
        ("somewhat disagree", -0.333),
        ("somewhat agree", 0.333),
        ("agree", 0.667),
        ("strongly agree", 1),
    ],
    "likert_scale_7": [
        ("strongly disagree", -1),
        ("disagree", -0.667),
        ("somewhat disagree", -0.333),
        ("neither agree nor disagree", 0),
        ("somewhat agree", 0.333),
        ("agree", 0.667),
        ("strongly agree", 1),
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_scales_of_words(name: str) -> None:
    scale = SCALES[name]
    assert list(scale.texts) == [text for text, _ in EXPECTED[name]]
    assert scale.values == pytest.approx([value for _, value in EXPECTED[name]], abs=5e-4)


@pytest.mark.parametrize(
    ("name", "most"), [("out_of_10", 10), ("likert_int_scale_11", 10), ("out_of_100", 100)]
)
def test_scales_of_numbers(name: str, most: int) -> None:
    scale = SCALES[name]
    assert scale.texts == tuple(str(number) for number in range(most + 1))
    assert (scale.read("0"), scale.read(str(most // 2)), scale.read(str(most))) == (-1.0, 0.0, 1.0)
    assert scale.read(f"{7 * most // 10}") == pytest.approx(0.4)


@given(st.sampled_from(sorted(SCALES)), st.data())
def test_every_option_is_read_as_itself(name: str, data: st.DataObject) -> None:
    scale = SCALES[name]
    text, value = data.draw(st.sampled_from(scale.options))
    around = data.draw(st.sampled_from(["{}", " {} ", "**{}**", '"{}".', "{}, because of line 3", "{}\n"]))
    assert scale.read(around.format(text.upper())) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("accept_reject", "accept or reject?", None),
        ("accept_reject", "accept/reject", None),
        ("accept_reject", "acceptable", None),
        ("accept_reject", "I accept", None),
        ("accept_reject", "", None),
        ("out_of_10", "7/10", 0.4),
        ("out_of_10", "7 out of 10", 0.4),
        ("out_of_10", "7/100", None),
        ("out_of_10", "7.5", None),
        ("out_of_10", "11", None),
        ("out_of_10", "-3", None),
        ("out_of_100", "10", -0.8),
        ("likert_scale_5", "agree", 0.5),
        ("likert_scale_5", "agree or disagree", None),
    ],
)
def test_reading_a_decision(name: str, text: str, value: float | None) -> None:
    found = SCALES[name].read(text)
    assert found == (None if value is None else pytest.approx(value))
