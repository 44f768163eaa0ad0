"""What came of a demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etude.core.keys import generator
from etude.demo.words import episode_in_words
from etude.loop.evaluation import Evaluation
from etude.store.episodes import read_episode
from etude.store.journal import Journal

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Shown:
    """An example with the agent's episode before training and after, in words."""

    example: str
    before: list[str]
    after: list[str]


@dataclass(frozen=True, slots=True)
class Variant:
    """The agent in other circumstances than those it was trained in."""

    name: str
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What came of a demo."""

    folder: Path
    run: Path
    """The run folder of the training."""
    before: Evaluation
    after: Evaluation
    greedy: Evaluation
    """After training, at temperature 0."""
    variants: list[Variant]
    shown: list[Shown]
    plot: Path
    model: Path
    """The trained model, as a folder that `transformers` loads."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "folder": str(self.folder),
            "run": str(self.run),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "greedy": self.greedy.as_json(),
            "variants": [
                {"name": one.name, "before": one.before.as_json(), "after": one.after.as_json()}
                for one in self.variants
            ],
            "episodes": [asdict(one) for one in self.shown],
            "plot": str(self.plot),
            "model": str(self.model),
            "seconds": self.seconds,
        }


def shown_episodes(
    journal: Journal, phases: tuple[str, str], before: Evaluation, after: Evaluation, seed: int
) -> list[Shown]:
    """Three examples with their episodes in both phases: those first that training helped most."""
    earlier, later = _scores(before), _scores(after)
    names = [name for name in earlier if name in later]
    generator(seed, "shown").shuffle(names)
    names.sort(key=lambda name: (earlier[name] or 0.0) - (later[name] or 0.0))
    told = [
        _told(journal, phase, names[:_SHOWN], scores)
        for phase, scores in zip(phases, (earlier, later), strict=True)
    ]
    return [Shown(name, first, second) for name, first, second in zip(names, *told, strict=False)]


def _told(
    journal: Journal, phase: str, names: Sequence[str], scores: dict[str, float | None]
) -> list[list[str]]:
    records = [read_episode(journal, f"{phase}/{name}/0") for name in names]
    return [
        [] if record is None else episode_in_words(record, scores[name])
        for name, record in zip(names, records, strict=True)
    ]


def _scores(evaluation: Evaluation) -> dict[str, float | None]:
    items = evaluation.output.results_of(str(evaluation.reward))
    return {item.id: item.score if item.is_scored else None for item in items}
