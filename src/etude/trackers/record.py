"""The seam of trackers: what they are given of a run, and the three methods that one has.

A tracker never sees the run itself. All that it gets was read from the journal, so that nothing is lost while
it is away, and a tracker of one's own has the same guarantees as those that ship.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from etude.core.errors import EtudeError, MissingExtraError, first_line

State: TypeAlias = Literal["finished", "failed", "stopped"]
"""How a process ended its part of a run. `stopped`: it may be resumed."""

SECONDS_TO_ANSWER = 10.0

COLUMNS = ("episode", "example", "input", "output", "reward", "scores", "failure", "tokens", "version")
"""Of a table of episodes."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode in a table of samples."""

    episode: str
    """Its id."""
    example: str
    input: str
    """The messages of the first call."""
    output: str
    reward: float | None
    scores: Mapping[str, float | None]
    """By evaluator."""
    failure: str
    """Why it failed; empty where it did not."""
    tokens: int
    """Sampled ones."""
    version: int | None
    """Of the weights that sampled it."""

    def cells(self) -> tuple[str | float | int | None, ...]:
        """A cell for each of `COLUMNS`."""
        scores = ", ".join(
            f"{name} {'none' if score is None else format(score, '.3f')}"
            for name, score in self.scores.items()
        )
        asked = (self.episode, self.example, self.input, self.output)
        return (*asked, self.reward, scores, self.failure, self.tokens, self.version)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One thing that has happened in a run, once and for all."""

    key: str
    """The same for the same record, whenever it is read."""
    kind: Literal["warm_up", "validation", "epoch", "evaluation", "finished"]
    step: int
    """Epochs that were over with it."""
    at: float
    """When it happened; Unix seconds."""
    metrics: Mapping[str, float]
    """By names such as `train/avg_reward`, `learner/loss`, `validation/reward_low`."""
    target: str | None = None
    """Of several models the one that it is about."""
    alarms: tuple[str, ...] = ()
    """The alarms that ring in it, a sentence each."""
    episodes: tuple[EpisodeRow, ...] = ()
    number: int = 0
    """How many other records the tracker was sent before."""

    def logged(self, api: Any) -> dict[str, Any]:
        """The record as W&B's API, or one like it, logs it: its metrics, and tables of that API."""
        data: dict[str, Any] = {**self.metrics}
        if self.episodes:
            rows = [list(row.cells()) for row in self.episodes]
            data[f"episodes/{self.kind}"] = api.Table(columns=list(COLUMNS), data=rows)
        if self.alarms:
            data["alarms"] = api.Table(columns=["alarm"], data=[[text] for text in self.alarms])
        return data


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str
    folder: Path
    token: str
    """A word of letters and digits for this run at this tracker, kept in the journal: a resumed run has it
    again, and no other run has it."""
    config: Mapping[str, Any]
    """The config as the run folder has it, without secrets."""
    environment: Mapping[str, Any]
    """Versions of Python, Etude and all packages, the machine, and the `git` commit."""

    @property
    def unique_name(self) -> str:
        """A name of letters, digits, `.`, `_` and `-` that no other run has, as `one-4f2c1a`."""
        return re.sub(r"[^\w.-]", "-", f"{self.name}-{self.token[:6]}", flags=re.ASCII)

    @property
    def flat_config(self) -> dict[str, str]:
        """The config as texts by dotted names: `{"llms.policy.model": "Qwen/Qwen3-0.6B"}`."""
        return _flattened(self.config)

    @property
    def code(self) -> dict[str, str]:
        """The code that it was made with: `etude`, `python`, and the `git` commit of the user's folder."""
        known = self.environment
        versions = {name: str(known[name]) for name in ("etude", "python") if known.get(name)}
        if git := known.get("git"):
            versions["git"] = str(git["commit"]) + (", with changes" if git["dirty"] else "")
        return versions


class Tracker(Protocol):
    """Shows a run elsewhere. All methods are called from one thread, and may wait and raise.

    After one has raised, `open` is called again some time later, and then `send` with the same record. Each
    record is sent at least once: again, with the same `key` and `number`, where the process was killed before
    the journal had it that the record was sent.
    """

    def open(self, run: TrackedRun) -> str:
        """Begin to show a run, or go on with what `run.token` was shown under before.

        Gives where it can be looked at, in a few words or as an address; empty for nowhere.
        """

    def send(self, record: RunRecord) -> None:
        """Show a record. When this has returned it counts as shown."""

    def close(self, state: State) -> None:
        """The process that shows the run ends; it may be opened again by another one."""


def require_package(module: str, extra: str) -> None:
    """Raise MissingExtraError where a module is not installed."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise MissingExtraError(f"the tracker '{extra}'", extra)


def require_server(url: str) -> None:
    """Raise EtudeError where nobody answers at an address of HTTP: packages would try for minutes."""
    import httpx  # Only here: most runs have no such tracker.

    try:
        httpx.head(url, timeout=SECONDS_TO_ANSWER, verify=False)  # Nothing is sent, and nothing believed.
    except httpx.TransportError as error:
        raise EtudeError(f"nobody answers at {url}: {first_line(error)}") from error


def _flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            texts |= _flattened(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            texts |= _flattened({str(index): item for index, item in enumerate(value)}, f"{name}.")
        elif value is not None:
            texts[name] = str(value)
    return texts
