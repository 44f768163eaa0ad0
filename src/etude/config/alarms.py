"""The short ways to write the alarms of a config.

`reward_collapse: stop` is `{_type: reward_collapse, action: stop}`, `{epochs: 3}` under the name of an alarm
is one of that type, and `alarms: off` turns all of them off.
"""

from __future__ import annotations

from typing import Any, get_args

from etude.config import registry
from etude.config.component import AlarmConfig
from etude.config.document import dig, replace_at
from etude.config.import_path import is_import_path
from etude.config.nearest import alternatives
from etude.config.problems import Problems
from etude.config.registry import NAMED
from etude.core.history import Action

ACTIONS: tuple[str, ...] = get_args(Action)


def alarms_by_default() -> dict[str, type[AlarmConfig]]:
    """The types of alarms that are on in a run whose config does not name them, by name."""
    types = {name: registry.lookup("alarms", name).config_type for name in registry.names("alarms")}
    return {name: kind for name, kind in types.items() if issubclass(kind, AlarmConfig) and kind.by_default}


def spell_out_alarms(data: dict[str, Any], problems: Problems) -> None:
    """Write the alarms of `data` as components with a `_type`; what is no alarm is noted as a problem."""
    section = NAMED["alarms"]
    entries = dig(data, section)
    if entries in (False, "off"):
        entries = dict.fromkeys(alarms_by_default(), False)
        replace_at(data, section, entries)
    for name, value in entries.items() if isinstance(entries, dict) else ():
        if value in (None, "on") or isinstance(value, bool):
            value = "off" if value is False else {}
        if isinstance(value, str) and not is_import_path(value):
            if value not in ACTIONS:
                hint = "; or a mapping with its thresholds"
                text = f"'{value}' is no action of an alarm{alternatives(value, ACTIONS)}{hint}"
                problems.add((*section, name), text)
            value = {"_type": name, **({"action": value} if value in ACTIONS else {})}
        elif isinstance(value, dict):
            kind = value.get("_type")
            # An override of a threshold has made `_type` of what was written as an action alone.
            action = {"action": kind} if kind in ACTIONS else {}
            value = {**action, **value, "_type": name if kind is None or action else kind}
        entries[name] = value
