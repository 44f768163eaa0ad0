"""Each alarm on histories written by hand: when it rings, and what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from etude.config.finetuning import FinetuneConfig
from etude.core.history import AlarmEvent, Entry
from etude.loop.alarms import (
    PAGE,
    REMEDIES,
    Alarm,
    CutOffAnswers,
    EntropyCollapse,
    EqualGroups,
    Failures,
    Mismatch,
    PartialReward,
    RewardCollapse,
    active_alarms,
    alarm_events,
)
from etude.loop.metrics import reward_metrics
from tests.show.histories import epoch, validation


def rung(alarm: Alarm, entries: list[Entry]) -> list[list[AlarmEvent]]:
    """The alarms that hold for each of the entries, as a run records them."""
    recorded: list[Entry] = []
    for entry in entries:
        events = alarm_events({"a": alarm}, entry, recorded)
        recorded.append(entry.model_copy(update={"alarms": events}))
    return [list(entry.alarms) for entry in recorded]


def rings(alarm: Alarm, entries: list[Entry]) -> str:
    """A letter for each entry: `R` where the alarm rings, `h` where it holds on, `.` where all is well."""
    held = [[event.is_new for event in events] for events in rung(alarm, entries)]
    return "".join("." if not each else "R" if any(each) else "h" for each in held)


def epochs(key: str, values: list[Any], **metrics: Any) -> list[Entry]:
    """Epochs with a metric, which is not there where it is None."""
    found = [{"avg_reward": 0.5, **metrics, **({} if value is None else {key: value})} for value in values]
    return [
        epoch(number, each.pop("avg_reward"), min_reward=0.0, max_reward=1.0, **each)
        for number, each in enumerate(found)
    ]


def rewards(*triples: tuple[float, float, float] | None) -> list[Entry]:
    """Epochs with a reward between two bounds; with none where there is None."""
    return [
        epoch(number, None)
        if each is None
        else epoch(number, each[0], reward_low=each[1], reward_high=each[2])
        for number, each in enumerate(triples)
    ]


def reward_epochs(*rewards: list[float]) -> list[Entry]:
    """Epochs in which these rewards were earned."""
    metrics = [reward_metrics(each) for each in rewards]
    return [epoch(number, each.pop("avg_reward"), **each) for number, each in enumerate(metrics)]


HIGH, LOW, UNSURE = (0.5, 0.45, 0.55), (0.2, 0.15, 0.25), (0.4, 0.3, 0.5)


def cut(count: int) -> dict[str, int]:
    return {"answers": 100, "cut_off": count}


TABLE: list[tuple[Alarm, list[Entry], str]] = [
    # A reward is surely lower where the intervals do not touch.
    (RewardCollapse(), rewards(HIGH, LOW, LOW, HIGH, LOW), ".Rh.R"),
    (RewardCollapse(), rewards(HIGH, UNSURE, (0.9, 0.8, 1.0)), "..."),
    (RewardCollapse(), rewards(HIGH, LOW, None, LOW), ".R.R"),
    (EntropyCollapse(), epochs("sampled_entropy", [2.0, 0.2, 0.09, 0.09, 0.09]), "...Rh"),
    (EntropyCollapse(), epochs("sampled_entropy", [2.0, 0.09, None, 0.09, 1.0]), "...R."),
    (EntropyCollapse(), epochs("sampled_entropy", [0.0, 0.0, 0.0]), "..."),
    # The mean rises by answers that earn a part; or because more have the best, or a better best.
    (PartialReward(), reward_epochs([0.0] * 48 + [0.2] * 16, [0.2] * 45 + [0.0] * 19, [0.2] * 64), ".Rh"),
    (PartialReward(), reward_epochs([0.0] * 16, [0.2] * 16, [0.2] * 16), "..."),
    (PartialReward(), reward_epochs([0.0] * 48 + [1.0] * 16, [0.0] * 16 + [1.0] * 48), ".."),
    (PartialReward(), reward_epochs([0.0, 5.0, 7.0] * 8, [5.0, 7.0, 7.0] * 8), ".."),
    (PartialReward(), reward_epochs([0.0, 0.0, 7.0] * 8, [5.0, 5.0, 7.0] * 8), ".R"),
    (PartialReward(), reward_epochs([0.2] * 4 + [0.0] * 4, [0.2] * 5 + [0.0] * 3), ".."),
    (EqualGroups(), epochs("reward_groups", [{"compared": 4, "flat": n} for n in (3, 4, 4)]), ".Rh"),
    (EqualGroups(at_least=0.75), epochs("reward_groups", [{"compared": 4, "flat": n} for n in (2, 3)]), ".R"),
    (EqualGroups(), epochs("reward_groups", [{"compared": 0, "flat": 0}]), "."),
    (CutOffAnswers(), epochs("calls", [cut(20), cut(21), cut(30), cut(0), cut(99)]), ".Rh.R"),
    (CutOffAnswers(above=0.5), epochs("calls", [cut(50), cut(51)]), ".R"),
    (Mismatch(), epochs("training", [{"mismatch_kl": n} for n in (1e-9, 0.05, 0.06)]), "..R"),
    (Mismatch(), epochs("training", [{}, {"loss": 1.0}]), ".."),
]


@pytest.mark.parametrize(("alarm", "entries", "expected"), TABLE)
def test_when_an_alarm_rings_and_when_it_holds_on(alarm, entries, expected):
    assert rings(alarm, entries) == expected


@pytest.mark.parametrize("alarm", [EntropyCollapse(), EqualGroups()])
def test_a_model_that_has_learnt_its_task_may_say_the_same_each_time(alarm):
    start = {"sampled_entropy": 2.0, "reward_groups": {"compared": 4, "flat": 1}}
    metrics = {"sampled_entropy": 0.001, "reward_groups": {"compared": 4, "flat": 4}}

    def holds_after(reward: float, low: float, high: float) -> bool:
        entries = [epoch(0, low, min_reward=low, max_reward=high, **start)]
        entries += [epoch(n, reward, min_reward=reward, max_reward=reward, **metrics) for n in (1, 2)]
        return rings(alarm, entries)[-1] != "."

    assert not holds_after(0.95, 0.0, 1.0)
    assert holds_after(0.8, 0.0, 1.0)
    assert not holds_after(-0.5, -20.0, 0.0)
    # All rewards have been equal from the start.
    assert holds_after(0.0, 0.0, 0.0)
    assert holds_after(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "symptom"),
    [
        ([0.0] * 64, "no-answer-is-right"),
        ([0.0] * 62 + [1.0] * 2, "no-answer-is-right"),
        ([0.2] * 64, "no-answer-is-right"),
        ([0.0] * 40 + [1.0] * 24, "most-groups-are-flat"),
        ([-3.0] * 64, "most-groups-are-flat"),
        ([1.0] * 64, "nothing-is-left-to-learn"),
    ],
)
def test_what_to_do_about_flat_groups_depends_on_how_many_answers_are_right(rewards, symptom):
    (entry,) = reward_epochs(rewards)
    flat = entry.model_copy(update={"metrics": entry.metrics | {"reward_groups": {"compared": 8, "flat": 7}}})
    ((event,),) = rung(EqualGroups(), [flat])
    assert event.text.endswith(f"; {REMEDIES[symptom]}")


def test_each_remedy_is_a_section_of_the_page():
    headings = re.findall(r"^## (.+)$", (Path(__file__).parents[2] / PAGE).read_text(), re.MULTILINE)
    assert {heading.lower().replace(" ", "-") for heading in headings} >= set(REMEDIES)


def test_each_cause_of_failures_rings_by_itself():
    def cause(reason: str, kind: str = "call_failed") -> dict[str, Any]:
        return {"kind": kind, "reason": reason, "count": 3, "episode": "train/1/a/0"}

    failing = [
        epoch(0, 0.5, failure_causes=[cause("no answer within 30 s")]),
        epoch(1, 0.5, failure_causes=[cause("no answer within 31 s")]),
        epoch(2, 0.5, failure_causes=[cause("no answer within 32 s"), cause("HTTP 500", "score:judge")]),
    ]
    new = [[event.text for event in events if event.is_new] for events in rung(Failures(), failing)]
    assert new == [
        ["3 episodes failed (call_failed): no answer within 30 s"],
        [],
        ["3 scores of 'judge' failed: HTTP 500"],
    ]
    assert rung(Failures(above=3), failing) == [[], [], []]


def test_a_sentence_says_what_was_seen_what_it_means_and_what_to_do():
    (event,) = rung(RewardCollapse(action="stop"), rewards(HIGH, LOW, LOW))[2]
    low, high = r"0\.200 \[0\.150, 0\.250\] \(.* 3, .* v2\)", r"0\.500 \[0\.450, 0\.550\] \(.* 1, .* v0\)"
    said = rf".*reward .*{low} .*{high}: v2 .*{re.escape(REMEDIES['the-reward-falls'])}"
    assert re.fullmatch(said, event.text)
    assert (event.alarm, event.of, event.action) == ("a", "", "stop")


def test_validations_are_compared_with_validations():
    start = validation(0, 0.5, reward_low=0.45)
    (event,) = rung(RewardCollapse(), [start, validation(1, 0.0, reward_high=0.1)])[1]
    assert "v1 is worse than" in event.text
    others = {"reward_high": 0.01, "target": "prover"}
    (event,) = rung(RewardCollapse(), [start, validation(1, 0.0, **others)])[1]
    assert "v1 may be worse" in event.text and "others have improved" in event.text


class Broken(Alarm, name="broken_for_tests"):
    def look(self, entry, earlier):
        return {}["missing"]


def test_an_alarm_that_fails_says_so_once_and_asks_nothing_of_the_run():
    events = [each for (each,) in rung(Broken(action="stop"), epochs("x", [1, 2, 3]))]
    assert [event.is_new for event in events] == [True, False, False]
    assert {event.action for event in events} == {"warn"}
    assert "code failed: " in events[0].text and "KeyError: 'missing'" in events[0].text


def test_what_is_not_named_is_on_and_warns_and_what_is_off_is_not_there():
    names = active_alarms(FinetuneConfig())
    assert {alarm.action for alarm in names.values()} == {"warn"}
    block = FinetuneConfig(alarms={"mismatch": Mismatch(action="off"), "mine": Mismatch(above=1.0)})
    assert active_alarms(block).keys() == names.keys() - {"mismatch"} | {"mine"}
