"""Gymnasium's environments, and careless ones of users."""

import re

import pytest

pytest.importorskip("gymnasium")

from etude.core.errors import ConfigError, RequestError
from etude.integrations.games.gym_textarena import chosen_action
from tests.integrations.games import careless
from tests.integrations.games.playing import play, scores

LAKE = {
    "_type": "gym",
    "id": "FrozenLake-v1",
    "arguments": {"is_slippery": False, "render_mode": "ansi"},
    "action": ["left", "down", "right", "up"],
}
HERE = "tests.integrations.games.careless"


def counting(fault: str = "", **keys):
    return {"_type": "gym", "id": f"{HERE}:Counting", "arguments": {"fault": fault}, **keys}


def right(request):
    """The number that the last observation names."""
    return re.findall(r"\d", request.messages[-1]["content"])[-1]


async def test_a_game_is_played_in_turns_and_its_rewards_are_added_up(journal):
    walk = ["down", "I go Down.", "right", "right", "down", "right"]
    (record,) = await play(LAKE | {"prompt": "Reach G."}, journal, walk)
    assert record.failure is None
    assert scores(record) == {"turns": 6, "invalid": 0, "reward": 1.0}
    first = record.calls[0].request.messages[0]["content"]
    assert first.startswith("Reach G.\n\n") and "FHFH" in first
    assert len(record.calls[-1].request.messages) == 11  # The whole game so far.


async def test_an_answer_that_is_no_action_is_told_and_counted(journal):
    (record,) = await play(counting(max_turns=3), journal, ["1 or 2", "yes", "7"])
    assert scores(record) == {"turns": 3, "invalid": 3, "reward": 0.0}
    told = [call.request.messages[-1]["content"] for call in record.calls[1:]]
    assert "several of" in told[0] and "none of" in told[1]
    assert all(text.endswith(" one of: 0, 1, 2") for text in told)


async def test_without_its_history_a_player_sees_the_observation_again(journal):
    workflow = counting(history=False, prompt="Play.")
    (record,) = await play(
        workflow,
        journal,
        lambda request: "no" if len(request.messages[0]["content"]) < 20 else right(request),
    )
    first, again = (call.request.messages[-1]["content"] for call in record.calls[:2])
    assert again.startswith("Play.\n\nThat is not") and again.endswith(first.removeprefix("Play."))


async def test_functions_of_ones_own_make_actions_and_observations(journal):
    keys = {"action": f"{HERE}:two_times", "observation": f"{HERE}:shout", "history": False}
    (record,) = await play(counting(**keys), journal, lambda request: f"{right(request)} {right(request)}")
    assert scores(record)["reward"] == 2.0
    assert [len(call.request.messages) for call in record.calls] == [1, 1]
    assert record.calls[0].request.messages[0]["content"].startswith("SAY ")


@pytest.mark.parametrize("text", ["-1", "1.5", "I move -1"])
def test_a_number_within_another_is_no_action(text):
    with pytest.raises(ValueError, match="none of"):
        chosen_action(text, {"0": 0, "1": 1, "2": 2})


def test_a_longer_action_is_not_the_shorter_ones_in_it():
    moves = {"up": 0, "left": 1, "up left": 2}
    assert [chosen_action(text, moves) for text in ("I go Up Left.", "up", "go left!")] == [2, 0, 1]
    for text in ("up or up left", "up, left", "upleft"):
        with pytest.raises(ValueError, match=r"several of|none of"):
            chosen_action(text, moves)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", r"step\(\) failed: .*careless.py:\d+: KeyError: 'no such square'"),
        ("nan", r".*reward nan .*finite"),
        ("four", r"step\(\) failed: .*not enough values"),
        ("reset", r"reset\(\) failed: .*too many values"),
        ("picture", r".*observation .* 12288 numbers, shape \(64, 64, 3\)"),
    ],
)
async def test_what_a_careless_environment_does_is_named_and_it_is_closed(journal, fault, reason):
    careless.Counting.closed.clear()
    (record,) = await play(counting(fault), journal, right)
    assert record.failure is not None and record.failure.kind == "raised"
    assert re.search(f"careless:Counting: {reason}", record.failure.reason), record.failure.reason
    assert careless.Counting.closed == [fault]


async def test_what_there_is_not_is_refused_before_anything_is_played(journal):
    with pytest.raises(RequestError, match=r"Gymnasium's 'FrozenLak-v1'.*'FrozenLake"):
        await play(LAKE | {"id": "FrozenLak-v1"}, journal, ["up"])
    with pytest.raises(ConfigError, match=r"'workflow.max_turn'.*'max_turns'"):
        await play(LAKE | {"max_turn": 3}, journal, ["up"])
    (record,) = await play({"_type": "gym", "id": f"{HERE}:Pictures"}, journal, ["up"])
    assert "an action of Box" in record.failure.reason
