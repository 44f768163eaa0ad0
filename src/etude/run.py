"""A finished or running run, as the verbs return it, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError, StoreError
from etude.core.history import Entry
from etude.engines.ledger import Bill, read_bill
from etude.store.episodes import iter_episodes
from etude.store.facts import RunFacts, RunVersion, choose_version, read_facts
from etude.store.histories import JobFacts, read_histories, read_jobs
from etude.store.run_folder import RunFolder

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
        """The version number; 0 is the model that training began with."""
        return self.chosen.number

    @property
    def path(self) -> Path | None:
        """The folder of the weights in the run. None for the base model, or if a server has the weights."""
        return self.chosen.folder

    @property
    def location(self) -> str | None:
        """The folder, or the server's name for the model; None for the base model."""
        return None if self.chosen.version is None else str(self.path or self.chosen.version.location)

    def load(self) -> Policy:
        """Load the model in this process. Raises RequestError if only a server has its weights."""
        from etude.loop.evaluation import load_version

        return load_version(self.chosen)

    def export(self, folder: str | Path, *, lora_only: bool = False) -> Path:
        """Write the model, or only its LoRA weights, as a folder for `transformers`. Return the folder."""
        from etude.show.exported_model import export_model

        export_model(self.chosen, Path(folder), lora_only=lora_only)
        return Path(folder)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The finished episodes of a run, read from its journal one at a time."""

    folder: Path
    phase: str = ""
    """A phase such as `train/3`, `validation/0` or `eval`; all phases if empty."""

    def __iter__(self) -> Iterator[EpisodeRecord]:
        with RunFolder.read(self.folder) as run:
            yield from iter_episodes(run.journal, f"{self.phase}/" if self.phase else "")

    def in_phase(self, phase: str) -> Episodes:
        """Return only the episodes of one phase."""
        return Episodes(self.folder, phase)


@dataclass(frozen=True, slots=True)
class Run:
    """A training run or an evaluation, read from its folder. Reading never disturbs a running process."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @property
    def facts(self) -> RunFacts:
        """The run's state, progress and settings. Raises RequestError if there is no such run."""
        return read_facts(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of a training run so far, or the result of an evaluation. Raises StoreError."""
        facts = self.facts
        if facts.problem is not None:
            raise StoreError(facts.problem)
        return facts.summary.as_json() if facts.kind == "train" else dict(facts.result or {})

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The `mean`, `low`, `high` (95 %) and `n` of each evaluator; in training, in the last validation."""
        summary = self.summary
        if "scores" in summary:
            return dict(summary["scores"])
        targets = (summary, *(summary.get("targets") or {}).values())
        figures = (each.get("after") or each.get("before") or {} for each in targets)
        return {name: score for each in figures for name, score in (each.get("evaluators") or {}).items()}

    @property
    def episodes(self) -> Episodes:
        """All finished episodes. `run.episodes.in_phase("train/1")` has one phase only."""
        return Episodes(self.folder)

    @property
    def jobs(self) -> list[JobFacts]:
        """The run's training jobs, by epoch."""
        return read_jobs(self.folder)

    @property
    def bill(self) -> Bill:
        """Everything used so far: calls, tokens, USD and hours, by model, by role and by part of the run."""
        return read_bill(self.folder)

    @property
    def metrics(self) -> Any:
        """A row for each validation and epoch, or for each episode of an evaluation.

        Columns that begin with `training/` describe the epoch's job. A data frame if pandas is installed,
        else a list of dicts.
        """
        if self.facts.kind != "evaluate":
            rows = _metric_rows(self.folder)
        elif not (path := self.folder / "items.jsonl").is_file():
            raise RequestError(
                f"the evaluation {self.folder} is not finished; continue it with etude.resume(run)"
            )
        else:
            items = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
            rows = [
                {**row, **{f"score.{name}": value for name, value in row["scores"].items()}} for row in items
            ]
        if find_spec("pandas") is None:
            return rows
        return import_module("pandas").DataFrame(rows)

    @property
    def model(self) -> TrainedModel:
        """The trained model: the best version by validation, or the last if no validation measured one.

        Raises RequestError if nothing was trained, or if there are several `models`.
        """
        return self.version()

    @property
    def models(self) -> dict[str, TrainedModel]:
        """The trained models by target, if the run has several targets."""
        targets = [name for name in read_histories(self.folder) if name is not None]
        return {name: self.version(name) for name in targets}

    def version(self, wish: str = "") -> TrainedModel:
        """Return a version: `v3`, `best`, `last` or `base`, and `prover:v3` if there are several models."""
        return TrainedModel(choose_version(self.folder, wish))


def _metric_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for target, history in read_histories(folder).items():
        whose: Mapping[str, Any] = {} if target is None else {"target": target}
        entries: list[Entry] = [*history.epochs, *history.validations]
        for entry in sorted(entries, key=lambda entry: entry.epoch):
            training: Mapping[str, Any] = entry.metrics.get("training") or {}
            learned = {f"training/{name}": value for name, value in training.items()}
            rows.append({**entry.metrics, **learned, **whose, "kind": entry.kind, "epoch": entry.epoch})
    return rows
