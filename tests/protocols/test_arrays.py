"""The view as arrays: keys, shapes, and what is where."""

from __future__ import annotations

import numpy as np

from etude.protocols import Rollouts, adp, mnip, nip
from etude.store.journal import Journal
from tests.protocols.games import example, play_record, scripted

QUESTIONS = "Question for Expert_1: a?\nQuestion for Expert_2: b?"


async def test_keys_and_shapes(journal: Journal) -> None:
    engine = scripted(verifier=[QUESTIONS, "Decision: reject"], prover0=["no"], prover1=["yes"])
    protocol = mnip(max_message_rounds=5, verifier_no_guess_reward=0.25)
    about = example(0, stance=0, question="q", solution="s")
    records = [
        await play_record(protocol, engine, journal, about=about, id=f"train/1/e/{generation}")
        for generation in range(2)
    ]
    arrays = Rollouts.of(records).to_arrays(prompts=True)
    b, r, a, c = 2, 5, 3, 2
    for key in ("round", "seed", "y", "datapoint_id", "prover_stance", "question", "solution", "done",
                "terminated", "padding", "_node_id", "_parent_node_id"):  # fmt: skip
        assert arrays[key].shape == (b, r), key
    for state in (arrays, arrays["next"]):
        assert state["message_history"].shape == (b, r, r, c)
        assert state["message_agent_id"].shape == (b, r, r, c)
        assert state["raw_message_history"].shape == (b, r, r, a)
    agents = arrays["agents"]
    for key in ("message", "retry_count", "token_limit"):
        assert agents[key].shape == (b, r, a, c), key
    for key in ("raw_message", "decision", "continuous_decision", "valid_response", "active", "done",
                "expected_reward"):  # fmt: skip
        assert agents[key].shape == (b, r, a), key
    assert agents["prompt"].shape == (b, r, a, 4, 3)
    assert arrays["next"]["agents"]["reward"].shape == arrays["next"]["agents"]["done"].shape == (b, r, a)


async def test_what_is_where(journal: Journal) -> None:
    engine = scripted(verifier=[QUESTIONS, "Decision: reject"], prover0=["no"], prover1=["yes"])
    protocol = mnip(max_message_rounds=5, verifier_no_guess_reward=0.25)
    record = await play_record(protocol, engine, journal, about=example(0, stance=0, question="q"))
    arrays = Rollouts.of([record]).to_arrays(prompts=True)
    assert arrays["round"].tolist() == [[0, 1, 2, 3, 3]]
    assert (arrays["y"].tolist(), arrays["prover_stance"].tolist()) == ([[0] * 5], [[0] * 5])
    assert arrays["question"].tolist() == [["q"] * 5]
    assert arrays["datapoint_id"].tolist() == [["e"] * 5]
    assert arrays["padding"].tolist() == arrays["done"].tolist() == [[False, False, False, True, True]]
    assert arrays["next"]["done"].tolist() == [[False, False, True, True, True]]
    assert not arrays["terminated"].any()

    said = [["a?", "b?"], ["no", "yes"], [None, None], [None, None], [None, None]]
    nothing = [[None, None]] * 5
    history = arrays["message_history"][0].tolist()
    assert history[0] == nothing
    assert history[1] == [said[0], *nothing[1:]]
    assert history[2] == history[3] == history[4] == said
    assert arrays["next"]["message_history"][0, 0].tolist() == [said[0], *nothing[1:]]
    assert arrays["next"]["message_history"][0, 4].tolist() == said
    # Agents in their order: prover0, prover1, verifier.
    assert arrays["message_agent_id"][0, 4].tolist() == [[2, 2], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    raw = arrays["next"]["raw_message_history"][0, 2].tolist()
    assert raw[:3] == [[None, None, QUESTIONS], ["no", "yes", None], [None, None, "Decision: reject"]]

    agents = arrays["agents"]
    assert agents["message"][0, 1].tolist() == [["no", None], [None, "yes"], [None, None]]
    assert agents["decision"][0].tolist() == [[2, 2, 2], [2, 2, 2], [2, 2, 0], [2, 2, 2], [2, 2, 2]]
    assert agents["continuous_decision"][0, 2].tolist() == [0.0, 0.0, -1.0]
    assert agents["active"][0].sum(axis=1).tolist() == [1, 2, 1, 0, 0]
    # Both provers argue for accept, and the verifier rightly rejects, after one idle turn.
    assert arrays["next"]["agents"]["reward"][0].tolist() == [
        [0.0, 0.0, 0.25],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    assert agents["expected_reward"][0, :, 2].tolist() == [1.25, 1.0, 1.0, 0.0, 0.0]
    assert agents["prompt"][0, 1, 0].tolist() == [
        ["You are prover0. e", None, "system"],
        ["Verifier (to you): a?", None, "user"],
        [None, None, None],
        [None, None, None],
    ]


async def test_running_out_of_rounds_is_terminated_and_retries_are_counted(journal: Journal) -> None:
    engine = scripted(verifier=["hm"], prover=[""])
    record = await play_record(nip(max_message_rounds=3), engine, journal, retries=2)
    arrays = Rollouts.of([record]).to_arrays()
    assert arrays["terminated"].tolist() == [[False, False, False]]
    assert arrays["next"]["terminated"].tolist() == [[False, False, True]]
    assert arrays["agents"]["retry_count"][0, :, :, 0].tolist() == [[0, 0], [2, 0], [0, 2]]
    assert arrays["agents"]["valid_response"][0].tolist() == [[True, True], [False, True], [True, False]]


async def test_each_way_that_a_play_went_is_a_row_and_nodes_are_unique(journal: Journal) -> None:
    engine = scripted(prover=["because"], verifier=["Decision: accept"])
    records = [
        await play_record(
            adp(), engine, journal, widths={"prover": 2, "verifier": 2}, id=f"train/{epoch}/e/0"
        )
        for epoch in range(2)
    ]
    arrays = Rollouts.of(records).to_arrays()
    # The same example in two epochs: nodes 0 to 5 and 6 to 11.
    assert arrays["_node_id"].tolist() == [[0, 2], [0, 3], [1, 4], [1, 5], [6, 8], [6, 9], [7, 10], [7, 11]]
    assert arrays["_parent_node_id"].tolist() == [[-1, node] for node in (0, 0, 1, 1, 6, 6, 7, 7)]
    assert arrays["y"].dtype == np.int64
