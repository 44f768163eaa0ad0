"""PettingZoo's environments with agents in turn."""

from __future__ import annotations

import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("pygame")

from etude.core.errors import RequestError
from tests.integrations.games.playing import played, scores

GAME = {
    "_type": "pettingzoo",
    "id": "classic/tictactoe-v3",
    "seats": {"player_1": "alice", "player_2": "bob"},
    "invalid_penalty": 0.1,
}
PLAYERS = ("alice", "bob")


async def test_each_agent_sees_its_own_side_and_earns_its_own_reward(journal):
    (record,) = await played(GAME, journal, ["0", "1", "3", "4", "6"], models=PLAYERS)
    assert scores(record) == {
        ("reward", "player_1"): 1.0,
        ("reward", "player_2"): -1.0,
        "turns": 5,
        "invalid": 0,
    }
    assert [call.model for call in record.calls] == ["alice", "bob", "alice", "bob", "alice"]


async def test_illegal_actions_are_told_counted_and_charged_and_never_played(journal):
    (record,) = await played(GAME, journal, ["0", "0", "nine", "1", "3", "4", "6"], models=PLAYERS)
    assert scores(record)["reward", "player_2"] == pytest.approx(-1.2)
    assert scores(record)["invalid"] == 2
    told = [call.request.messages[-1]["content"] for call in record.calls[2:4]]
    assert told[0] == "That is no action: it is not legal now"
    assert told[1].startswith("That is no action: it is none of the actions")


async def test_a_game_that_is_stopped_keeps_what_was_earned(journal):
    (record,) = await played(GAME | {"max_turns": 2}, journal, ["0", "1"], models=PLAYERS)
    assert record.failure is None
    assert scores(record)["reward", "player_1"] == 0.0


async def test_what_does_not_fit_is_named(journal):
    (record,) = await played(GAME | {"seats": {"player_1": "alice"}}, journal, ["0"], models=("alice",))
    assert "the agent 'player_2' has no model; name it in `seats`" in record.failure.reason
    with pytest.raises(
        RequestError, match="no environment of PettingZoo's with turns 'classic/tictactoe-v9'; did you mean"
    ):
        await played(GAME | {"id": "classic/tictactoe-v9"}, journal, ["0"], models=PLAYERS)
