"""Names of components in a config: whether they exist, and which is meant when none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.config.component import ComponentConfig
from etude.config.document import KeyPath, dotted
from etude.config.nearest import alternatives
from etude.config.problems import Problems
from etude.config.registry import NOUNS, Kind
from etude.config.schema import Config
from etude.config.sections import NAMED


def section(config: Config, kind: Kind) -> Mapping[str, ComponentConfig]:
    """The components of a kind that a config names. Raises KeyError for a kind that has no names."""
    part: Any = config
    for key in NAMED[kind]:
        part = getattr(part, str(key))
    entries: Mapping[str, ComponentConfig] = part
    return entries


def check_name(path: KeyPath, kind: Kind, name: str, config: Config, problems: Problems) -> None:
    """Note a name, which stands at `path`, that no component of the kind has."""
    entries = section(config, kind)
    if name not in entries:
        where = f"'{dotted(NAMED[kind])}' has no {NOUNS[kind]} '{name}'"
        problems.add(path, f"{dotted(path)}: {where}" + alternatives(name, entries, otherwise="it is empty"))


def choose(path: KeyPath, given: str | None, kind: Kind, config: Config, problems: Problems) -> str | None:
    """The name that is meant at `path`: the one given, or the only one that there is.

    Where finetuning is enabled and there are several, that is a problem.
    """
    entries = section(config, kind)
    if given is not None:
        check_name(path, kind, given, config, problems)
        return given
    candidates = list(entries)
    if kind == "llms" and len(entries) > 1:
        candidates = [name for name, entry in entries.items() if entry.type_name == "local"]
    if len(candidates) == 1:
        return candidates[0]
    if config.finetuning.enabled and entries and not problems.within(NAMED[kind]):
        several = f"'{dotted(NAMED[kind])}' has several; name one of: {', '.join(entries)}"
        problems.add(path, f"key '{dotted(path)}' is missing: {several}")
    return None
