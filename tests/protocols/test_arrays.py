"""The view as arrays: keys, shapes, and what is where."""

from __future__ import annotations

import numpy as np
import pytest

from etude.core.errors import RequestError
from etude.protocols import Rollouts, adp, mnip
from etude.store.journal import Journal
from tests.protocols.games import example, play_record, scripted

QUESTIONS = "Question for Expert_1: a?\nQuestion for Expert_2: b?"


async def test_what_is_where(journal: Journal) -> None:
    engine = scripted(verifier=[QUESTIONS, "Decision: reject"], prover0=["no"], prover1=["yes"])
    protocol = mnip(max_message_rounds=5, verifier_no_guess_reward=0.25)
    about = example(0, stance=0, question="q", solution="s")
    record = await play_record(protocol, engine, journal, about=about)
    arrays = Rollouts.of([record]).to_arrays()
    assert arrays["round"].tolist() == [[0, 1, 2, 3, 3]]
    assert (arrays["y"].tolist(), arrays["prover_stance"].tolist()) == ([[0] * 5], [[0] * 5])
    assert [arrays[key].tolist() for key in ("question", "solution")] == [[["q"] * 5], [["s"] * 5]]
    assert arrays["datapoint_id"].tolist() == [["e"] * 5]
    assert arrays["padding"].tolist() == [[False, False, False, True, True]]

    said = [["a?", "b?"], ["no", "yes"], [None, None], [None, None], [None, None]]
    nothing = [[None, None]] * 5
    history = arrays["message_history"][0].tolist()
    assert history[0] == nothing
    assert history[1] == [said[0], *nothing[1:]]
    assert history[2] == history[3] == history[4] == said
    # Agents in their order: prover0, prover1, verifier.
    assert arrays["message_agent_id"][0, 4].tolist() == [[2, 2], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    raw = arrays["raw_message_history"][0, 3].tolist()
    assert raw[:3] == [[None, None, QUESTIONS], ["no", "yes", None], [None, None, "Decision: reject"]]

    agents = arrays["agents"]
    assert agents["decision"][0].tolist() == [[2, 2, 2], [2, 2, 2], [2, 2, 0], [2, 2, 2], [2, 2, 2]]
    assert agents["continuous_decision"][0, 2].tolist() == [0.0, 0.0, -1.0]
    # Both provers argue for accept, and the verifier rightly rejects, after one idle turn.
    rewards = [[0.0, 0.0, 0.25], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert arrays["next"]["agents"]["reward"][0].tolist() == rewards


async def test_each_way_that_a_play_went_is_a_row(journal: Journal) -> None:
    engine = scripted(prover=["because"], verifier=["Decision: accept"])
    records = [
        await play_record(adp(), engine, journal, widths=2, id=f"train/{epoch}/e/0") for epoch in range(2)
    ]
    arrays = Rollouts.of(records).to_arrays()
    assert arrays["y"].shape == (8, 2)
    assert arrays["message_history"].shape == (8, 2, 2, 1)
    assert arrays["raw_message_history"].shape == (8, 2, 2, 2)
    assert arrays["y"].dtype == np.int64


def test_without_episodes_there_are_no_arrays() -> None:
    with pytest.raises(RequestError, match="no finished episodes"):
        Rollouts.of([]).to_arrays()
