"""The runs of a folder as the view reads them: found by name, and read again only where they have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from etude.core.errors import RequestError
from etude.core.history import Entry
from etude.store.database import DATABASE
from etude.store.facts import RunFacts, facts_of, histories_of, is_run, list_runs
from etude.store.figures import with_rewards
from etude.store.lock import locked_by
from etude.store.run_folder import LOCK
from etude.store.stored_config import CONFIG, reward_names, stored_data

_State = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in the list: its facts, and the rewards that its line has."""

    facts: RunFacts
    rewards: tuple[float, ...] = ()
    """Of the validations, or else of the epochs."""

    @property
    def share(self) -> float:
        """The share of its epochs that are over, in [0, 1]."""
        return min(1.0, self.facts.epochs_done / self.facts.num_epochs) if self.facts.num_epochs else 0.0


@dataclass(frozen=True, slots=True)
class Library:
    """The runs in a folder."""

    root: Path

    def find(self, name: str) -> Path:
        """The folder of a run. Raises RequestError where there is none of that name."""
        path = self.root / name
        if name in ("", ".", "..") or "/" in name or "\\" in name or not is_run(path):
            raise RequestError(f"there is no run '{name}' in {self.root}")
        return path

    def listed(self) -> list[ListedRun]:
        """All runs, the one changed last first."""
        return [self.run(path) for path in list_runs(self.root)]

    def run(self, path: Path) -> ListedRun:
        """A run in the list."""
        names = (DATABASE, f"{DATABASE}-wal", CONFIG, "evaluation.json", "summary.json")
        return _listed(path, _state(path, *names), locked_by(path / LOCK))

    def settings(self, path: Path) -> Mapping[str, Any]:
        """The config of a run, without secrets."""
        return _settings(path, _state(path, CONFIG))

    def reward(self, path: Path) -> str | None:
        """The evaluator whose score is the reward in a run; of several targets, that of the first."""
        return next(iter(reward_names(self.settings(path)).values()), None)

    def rewards(self, path: Path) -> dict[str | None, str]:
        """The evaluators whose scores are rewards, by target."""
        return reward_names(self.settings(path))


def _state(path: Path, *names: str) -> _State:
    """When files were last written, and how large they are."""
    stamps = []
    for name in names:
        try:
            stat = (path / name).stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((stat.st_mtime_ns, stat.st_size))
    return tuple(stamps)


@lru_cache(maxsize=1024)
def _settings(path: Path, state: _State) -> Mapping[str, Any]:
    return stored_data(path, required=False)


@lru_cache(maxsize=1024)
def _listed(path: Path, state: _State, pid: int | None) -> ListedRun:
    facts = facts_of(path)
    if facts.state == "unreadable" or facts.kind == "evaluate":
        return ListedRun(facts)
    histories = [*histories_of(path).values()]
    history = histories[0]
    measured: list[Entry] = with_rewards(history.validations)
    measured = measured if len(measured) > 1 else with_rewards(history.epochs)
    rewards = tuple(float(entry.metrics["avg_reward"]) for entry in measured)
    return ListedRun(facts, rewards if len(histories) == 1 else ())
