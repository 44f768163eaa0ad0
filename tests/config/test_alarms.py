"""The alarms of a config: their short forms, and what is said of mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.alarms.alarm import Alarm, alarms_of
from etude.config.load import load_config, parse_config, resolved_yaml
from etude.core.errors import ConfigError


class Refusals(Alarm, name="refusals_for_tests"):
    above: float = 0.1


def alarms(block: Any) -> dict[str, tuple[str, str]]:
    """The type and action of each alarm that a config names."""
    named = parse_config({"finetuning": {"alarms": block}}).finetuning.alarms
    return {name: (alarm.type_name, alarm.action) for name, alarm in named.items()}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (False, ("mismatch", "off")),
        ("off", ("mismatch", "off")),
        (True, ("mismatch", "warn")),
        (None, ("mismatch", "warn")),
        ("stop", ("mismatch", "stop")),
        ({"above": 0.5}, ("mismatch", "warn")),
        ({"action": False}, ("mismatch", "off")),
        ({"_type": "cut_off_answers", "action": "pause"}, ("cut_off_answers", "pause")),
        ("tests.config.test_alarms:Refusals", ("refusals_for_tests", "warn")),
        ({"_type": "tests.config.test_alarms:Refusals", "above": 0.3}, ("refusals_for_tests", "warn")),
    ],
)
def test_short_ways_to_write_an_alarm(written, expected):
    assert alarms({"mismatch": written}) == {"mismatch": expected}


def test_all_can_be_turned_off_at_once():
    assert alarms_of(parse_config({"finetuning": {"alarms": False}}).finetuning) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "reward_colapse: off",
            r":4:5: .*'reward_colapse'; did you mean 'reward_collapse'",
        ),
        (
            "reward_collapse: stopp",
            r":4:5: .*'stopp' is no action of an alarm; did you mean 'stop'",
        ),
        (
            "reward_collapse: {action: stopp}",
            "one of 'off', 'warn', 'pause', 'stop', 'rollback', found",
        ),
        ("reward_collapse: {bellow: 0.5}", r"reward_collapse.bellow' is not known; did you mean 'below'"),
        ("reward_collapse: {below: 2}", "expected a number > 0 and < 1, found 2"),
    ],
)
def test_mistakes_are_named_with_their_line_and_the_nearest_name(tmp_path: Path, line, message):
    (tmp_path / "config.yml").write_text(f"finetuning:\n  enabled: false\n  alarms:\n    {line}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yml")


def test_a_run_keeps_the_alarms_that_it_was_begun_with():
    block = {"mismatch": "pause", "mine": {"_type": "tests.config.test_alarms:Refusals", "above": 0.3}}
    config = parse_config({"finetuning": {"alarms": block}})
    again = parse_config(yaml.safe_load(resolved_yaml(config)))
    assert again.finetuning.alarms == config.finetuning.alarms


def test_overrides_change_an_alarm_however_it_is_written():
    data = {"finetuning": {"alarms": {"mismatch": "stop"}}}
    found = parse_config(data, ["finetuning.alarms.mismatch.above=0.7"]).finetuning.alarms["mismatch"]
    assert (found.action, found.above) == ("stop", 0.7)
    assert (
        parse_config(data, ["finetuning.alarms.mismatch=off"]).finetuning.alarms["mismatch"].action == "off"
    )
