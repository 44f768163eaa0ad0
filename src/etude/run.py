"""A run as the verbs return it: its summary, episodes, metrics and trained model, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.budget.bill import Bill, read_bill
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.history import Entry, EpochEntry
from etude.store.episodes import iter_episodes
from etude.store.facts import RunFacts, facts_of, histories_of
from etude.store.log import JobFacts, jobs_of
from etude.store.run_folder import RunFolder
from etude.store.versions import RunVersion, choose_version

if TYPE_CHECKING:
    from etude.models.policy import Policy


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One version of a model that a run trains."""

    chosen: RunVersion

    def __str__(self) -> str:
        return str(self.chosen)

    @property
    def version(self) -> int:
        """Its number; 0 is the model that training began with."""
        return self.chosen.number

    @property
    def path(self) -> Path | None:
        """The folder of its weights in the run; None for the base model and for weights of a server."""
        return self.chosen.folder

    @property
    def location(self) -> str | None:
        """Its folder, or the name that a server has for it; None for the base model."""
        return None if self.chosen.version is None else str(self.path or self.chosen.version.location)

    def load(self) -> Policy:
        """The model in this process. Raises RequestError when its weights are a server's."""
        from etude.loop.model import load_version

        return load_version(self.chosen)

    def export(self, folder: str | Path, *, lora_only: bool = False) -> Path:
        """Write it as a folder that `transformers` loads, or its LoRA weights alone; the folder."""
        from etude.export.model import export_model

        export_model(self.chosen, Path(folder), lora_only=lora_only)
        return Path(folder)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The finished episodes of a run, read from its journal one at a time as they are asked for."""

    folder: Path
    phase: str = ""
    """`train/3`, `validation/0`, `eval`; all phases when empty."""

    def __iter__(self) -> Iterator[EpisodeRecord]:
        with RunFolder.read(self.folder) as run:
            yield from iter_episodes(run.journal, f"{self.phase}/" if self.phase else "")

    def of(self, phase: str) -> Episodes:
        """Those of one phase."""
        return Episodes(self.folder, phase)


@dataclass(frozen=True, slots=True)
class Run:
    """A training run or an evaluation, as its folder has it. Reading it disturbs nobody."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def facts(self) -> RunFacts:
        """Whether it is finished, how far it came, with what. Raises RequestError without such a run."""
        return facts_of(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """A training run in numbers, as `summary.json` has them; of an evaluation its result."""
        facts = self.facts
        return facts.summary.as_json() if facts.kind == "train" else dict(facts.result or {})

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """By evaluator: `mean`, `low`, `high` (95 %), `n`; of a training run, in its last validation."""
        summary = self.summary
        if "scores" in summary:
            return dict(summary["scores"])
        return dict((summary.get("after") or summary.get("before") or {}).get("evaluators") or {})

    @property
    def episodes(self) -> Episodes:
        """All finished episodes; those of one phase: `run.episodes.of("train/1")`."""
        return Episodes(self.folder)

    @property
    def jobs(self) -> list[JobFacts]:
        """Its training jobs, by epoch."""
        return jobs_of(self.folder)

    @property
    def bill(self) -> Bill:
        """All that it has taken so far: calls, tokens, USD, hours; by model, by role, by part of the run."""
        return read_bill(self.folder)

    @property
    def metrics(self) -> Any:
        """A row for each validation and epoch, or of an evaluation for each episode.

        Columns that begin with `training/` are those of the epoch's job.

        A data frame where pandas is installed, else a list of dicts.
        """
        rows = _item_rows(self.folder) if self.facts.kind == "evaluate" else _metric_rows(self.folder)
        if find_spec("pandas") is None:
            return rows
        return import_module("pandas").DataFrame(rows)

    @property
    def model(self) -> TrainedModel:
        """The trained model: the best version by validation where that is known, else the last.

        Raises RequestError when nothing was trained, or several models were (`models`).
        """
        return self.version()

    @property
    def models(self) -> dict[str, TrainedModel]:
        """The trained models by target, where there are several."""
        targets = [name for name in histories_of(self.folder) if name is not None]
        return {name: self.version(name) for name in targets}

    def version(self, wish: str = "") -> TrainedModel:
        """Another version of the model: `v3`, `best`, `last`, `base`; of several models `prover:v3`."""
        return TrainedModel(choose_version(self.folder, wish))


def _metric_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for target, history in histories_of(folder).items():
        whose: Mapping[str, Any] = {} if target is None else {"target": target}
        entries: list[Entry] = [*history.epochs, *history.validations]
        for entry in sorted(entries, key=lambda entry: entry.epoch):
            job = entry.status if isinstance(entry, EpochEntry) else None
            training = {} if job is None else job.metrics
            learned = {f"training/{name}": value for name, value in training.items()}
            rows.append({**entry.metrics, **learned, **whose, "kind": entry.kind, "epoch": entry.epoch})
    return rows


def _item_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "items.jsonl"
    if not path.is_file():
        raise RequestError(f"the evaluation {folder} is not finished; etude.resume(run) goes on with it")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{**row, **{f"score.{name}": score for name, score in row["scores"].items()}} for row in rows]
