"""The dataset `logged`: the chats of a log as examples whose episodes were played already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.core.episode import EpisodeRecord, LoggedExample
from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.store.episodes import read_episode, stored_episodes
from etude.store.facts import find_run
from etude.store.run_folder import RunFolder
from etude.traces.importing import CHATS, HELD_OUT

if TYPE_CHECKING:
    from etude.config.builder import Builder


class LoggedConfig(DatasetConfig, name="logged"):
    """Chats that `etude import-traces` has stored."""

    run: Path
    """The folder of their run, or its name in `runs`."""
    part: Literal["chats", "held_out"] = "chats"
    """`chats`: they are read, and no model is asked. `held_out`: the prompts that were held out, which the
    agent answers."""
    limit: int | None = Field(default=None, ge=1)
    """Use at most this many prompts."""


class LoggedDataset:
    """The chats of a run, by the prompts that they began with."""

    def __init__(self, config: LoggedConfig) -> None:
        """Raises RequestError where there is no such run."""
        self._config = config
        self._path = find_run(str(config.run), Path("runs"))
        self._run = RunFolder.read(self._path)

    def examples(self) -> list[Example]:
        """An example for each prompt, by their ids, without the chats that ended in an error."""
        part, journal = self._config.part, self._run.journal
        phase = HELD_OUT if part == "held_out" else CHATS
        names: defaultdict[str, list[str]] = defaultdict(list)
        examples: dict[str, Example] = {}
        for name, data in stored_episodes(journal, f"{phase}/"):
            if data["failure"] is None:
                example = Example(**data["example"])
                names[example.id].append(name)
                examples[example.id] = example
        if not names:
            hint = "; import the log with --hold-out 0.2" if part == "held_out" else ""
            raise DatasetError(f"{self._path} has no chats of the part '{part}'{hint}")
        chosen = [*examples.values()][: self._config.limit]
        return chosen if part == "held_out" else [self._logged(each, names[each.id]) for each in chosen]

    def _logged(self, example: Example, names: list[str]) -> LoggedExample:
        return LoggedExample(
            example.id,
            example.inputs,
            example.expected,
            episodes=len(names),
            read=partial(self._read, names),
            origin=self._path.name,
        )

    def _read(self, names: list[str], number: int) -> EpisodeRecord:
        record = read_episode(self._run.journal, names[number])
        assert record is not None, "an import is never written to again"
        return record

    def close(self) -> None:
        """Close the run."""
        self._run.close()


@register_dataset(config_type=LoggedConfig)
async def logged(config: LoggedConfig, builder: Builder) -> AsyncIterator[LoggedDataset]:
    """The registered component `logged`."""
    dataset = LoggedDataset(config)
    try:
        yield dataset
    finally:
        dataset.close()
