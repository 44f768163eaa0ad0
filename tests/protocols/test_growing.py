"""Widths: how many answers are sampled where, and how many calls that can take."""

from __future__ import annotations

from typing import Any

import pytest

from etude.core.errors import RequestError
from etude.protocols import Widths, adp, debate, most_calls, nip, solo_verifier


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        (1, [1, 1, 1, 1]),
        (3, [3, 3, 3, 3]),
        ([4, 1], [4, 1, 1, 1]),
        ({"prover": 2}, [1, 2, 1, 2]),
        ({"prover": [1, 2, 3], "verifier": 5}, [5, 2, 5, 3]),
    ],
)
def test_widths_by_agent_and_round(widths: Any, expected: list[int]) -> None:
    found = Widths.of(widths)
    turns = ["verifier", "prover", "verifier", "prover"]
    assert [found.at(agent, number) for number, agent in enumerate(turns)] == expected
    assert Widths.of(found) is found


@pytest.mark.parametrize("widths", [0, -1, True, [], [2, 0], {"prover": 1.5}, {"prover": []}])
def test_impossible_widths_are_refused(widths: Any) -> None:
    with pytest.raises(RequestError, match="whole number of at least 1"):
        Widths.of(widths)


@pytest.mark.parametrize(
    ("protocol", "widths", "retries", "calls"),
    [
        (solo_verifier(), 4, 0, 4),
        (adp(), 1, 0, 2),
        (adp(), 3, 0, 3 + 9),
        (adp(), 3, 1, 2 * (3 + 9)),
        # Two answers of each prover make four pairs: 4 calls, then one or two for each pair.
        (debate(max_message_rounds=2, verifier_first=False), {"prover0": 2, "prover1": 2}, 0, 4 + 4),
        (debate(max_message_rounds=2, verifier_first=False), 2, 0, 4 + 8),
        (nip(max_message_rounds=5), 2, 0, 2 + 4 + 8 + 16 + 32),
    ],
)
def test_the_most_calls_of_a_play(protocol: Any, widths: Any, retries: int, calls: int) -> None:
    assert most_calls(protocol, Widths.of(widths), retries) == calls
