"""TextArena's games: a model on each seat, and a reward for each."""

import random
import re

from etude.config.load import parse_config
from etude.core.episode import Example
from tests.integrations.games.playing import play, scores
from tests.support import needs

pytestmark = needs("textarena")

NIM = {"_type": "textarena", "id": "Nim-v0", "seats": ["alice", "bob"], "max_turns": 20}
PLAYERS = ("alice", "bob")


def greedy(request):
    """All of the first pile that is left."""
    piles = re.findall(r"pile (\d): (\d+)", request.messages[-1]["content"])[-3:]
    return "[{} {}]".format(*next(pile for pile in piles if pile[1] != "0"))


async def test_each_player_has_its_model_its_conversation_and_its_reward(journal):
    (record,) = await play(NIM, journal, greedy, models=PLAYERS)
    assert scores(record) == {
        ("reward", "player_0"): 1.0,
        ("reward", "player_1"): -1.0,
        "turns": 3,
        "invalid": 0,
    }
    calls = [(call.function, call.model) for call in record.calls]
    assert calls == [("player_0", "alice"), ("player_1", "bob"), ("player_0", "alice")]
    opening, answer = (record.calls[place].request.messages for place in (0, 1))
    assert "Welcome to Nim, Player 0" in opening[0]["content"] and len(opening) == 1
    assert "Welcome to Nim, Player 1" in answer[0]["content"] and "pile 0: 0" in answer[0]["content"]
    last = record.calls[2].request.messages
    assert [message["role"] for message in last] == ["user", "assistant", "user"]
    assert "Welcome" not in last[2]["content"]  # Only what is new.


async def test_a_game_that_an_invalid_move_ended(journal):
    (record,) = await play(NIM, journal, ["I pass"], models=PLAYERS)
    measured = scores(record)
    assert measured["reward", "player_0"] == -1.0 and measured["reward", "player_1"] >= 0
    assert measured["invalid"] == 1


async def test_games_side_by_side_draw_as_they_would_alone(journal):
    """They all use Python's global generator, which nobody else is disturbed in."""
    poker = {"_type": "textarena", "id": "KuhnPoker-v0", "seats": ["alice", "bob"]}
    rows = [Example(str(number), {"seed": number % 4}) for number in range(16)]
    random.seed(1)
    expected = random.Random(1).random()
    records = await play(poker, journal, ["[check]"], models=PLAYERS, examples=rows, games=16)
    assert random.random() == expected
    cards = [
        [re.findall(r"card is: '(.)'", call.request.messages[-1]["content"]) for call in record.calls]
        for record in sorted(records, key=lambda record: int(record.example.id))
    ]
    assert all(record.failure is None for record in records)
    assert cards[:4] == cards[4:8] == cards[8:12] == cards[12:]
    assert len({str(game) for game in cards}) > 1


def test_two_trained_players_have_a_target_and_a_reward_each():
    llms = {name: {"_type": "local", "model": "base"} for name in PLAYERS}
    block = {"enabled": True, "targets": {"alice": {}, "bob": {}}}
    config = parse_config({"llms": llms, "workflow": NIM, "finetuning": block})
    rewards = {name: target.reward_function.name for name, target in config.finetuning.targets.items()}
    assert rewards == {"alice": "reward_player_0", "bob": "reward_player_1"}
    assert config.eval.evaluators["reward_player_1"].agent == "player_1"
    assert config.eval.general.dataset.split == "train"
