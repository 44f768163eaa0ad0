"""The list of runs, and the overview of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.budget.bill import bill_of
from etude.core.distribution import Distribution
from etude.core.history import Entry, History
from etude.report.words import (
    by_target,
    figure_lines,
    imported_lines,
    shown_ends,
    shown_epochs,
    shown_state,
)
from etude.store.episodes import epoch_of
from etude.store.facts import RunFacts
from etude.store.figures import failed_counts, shown_reward
from etude.store.log import histories
from etude.store.outline import phases_in
from etude.store.run_folder import RunFolder
from etude.store.status import status_of
from etude.store.stored_config import CONFIG
from etude.store.summary import causes_in
from etude.view.charts import charts_of
from etude.view.library import Library
from etude.view.pages import page

_WORDS: dict[str, Any] = {"state": shown_state, "epochs": shown_epochs, "ends": shown_ends}


def list_page(request: Request) -> Response:
    """All runs of the folder."""
    library: Library = request.app.state.library
    template = "runs_table.html" if request.query_params.get("part") == "table" else "runs.html"
    return page(request, template, runs=library.listed(), root=library.root, **_WORDS)


def run_page(request: Request) -> Response:
    """The overview of a run: its figures, charts, epochs and bill."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    template = "run_charts.html" if request.query_params.get("part") == "charts" else "run.html"
    return page(request, template, **overview(library, path))


def now_page(request: Request) -> Response:
    """The run's own word on its work and its waits; the line of it alone too."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    context = {"run": path.name, "tab": "Now", **_live(library, path)}
    if request.query_params.get("part") != "line":
        return page(request, "now.html", up=True, **context)
    answer = page(request, "live_line.html", **context)
    if request.query_params.get("done") != str(context["done"]):
        answer.headers["hx-trigger"] = "epochs"  # An epoch is over: the charts are drawn anew.
    return answer


def config_page(request: Request) -> Response:
    """The run's config, as it was resolved, and what it ran on."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    config = path / CONFIG
    with RunFolder.read(path) as run:
        environment = run.read_json("environment.json")
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return page(
        request, "config.html", run=path.name, tab="Config", up=True, config=text, environment=environment
    )


def overview(library: Library, path: Path) -> dict[str, Any]:
    """All that the overview of a run shows."""
    facts = library.run(path).facts
    with RunFolder.read(path) as run:
        models = histories(run.journal, run.name)
        bill = bill_of(run.journal)
        phases = phases_in(run.journal)
    entries = [entry for history in models.values() for entry in history.entries]
    by_epoch = {epoch: phase for phase in reversed(phases) if (epoch := epoch_of(phase)) is not None}
    return {
        "run": path.name,
        "tab": "Overview",
        "lines": [*_facts(facts)],
        "warnings": facts.summary.get("warnings") or [],
        "models": [
            {
                "name": name,
                "lines": figure_lines(summary)
                if name and (summary := by_target(facts.summary).get(name))
                else (),
                "charts": charts_of(history, bill),
                "rows": [*_rows(history, by_epoch)],
            }
            for name, history in models.items()
        ],
        "causes": [*causes_in(entries), *((facts.result or {}).get("causes") or [])],
        "bill": bill.by("model", "role"),
        **_live(library, path),
    }


def _live(library: Library, path: Path) -> dict[str, Any]:
    facts = library.run(path).facts
    return {"seen": status_of(path), "state": shown_state(facts), "done": facts.epochs_done, "facts": facts}


def _facts(facts: RunFacts) -> list[tuple[str, str]]:
    """Labels and texts: what was trained, and what came of it."""
    lines = [("epochs", shown_epochs(facts)), ("model", facts.model or facts.base), ("method", facts.method)]
    lines += [("backend", facts.backend)]
    known = [(label, text) for label, text in lines if text]
    if facts.kind == "import":
        return imported_lines(facts.result or {})
    if facts.kind == "evaluate":
        return [*known, ("reward", shown_ends(facts)[1] or "none yet")]
    summary = by_target(facts.summary).get(None)
    return [*known, *figure_lines(summary)] if summary else known


@dataclass(frozen=True, slots=True)
class _Row:
    """An epoch in the table."""

    epoch: int
    phase: str | None
    reward: str
    rewards: str | None
    """How they are distributed."""
    episodes: int | None
    failed: int
    cut_off: float | None
    trained: int | None
    version: str | None
    validation: str | None
    note: str | None


def _start(metrics: Mapping[str, Any], note: str) -> _Row:
    return _Row(0, None, "–", None, None, 0, None, None, None, shown_reward(metrics), note)


def _distribution(entry: Entry) -> str | None:
    found = Distribution.among(entry.metrics)
    return None if found is None else f"{found}: {found.shown_bars()}"


def _rows(history: History, phases: Mapping[int, str]) -> list[_Row]:
    """The epochs, the latest first, and the validation after each."""
    validations = {entry.epoch: entry.metrics for entry in history.validations}
    rows = [
        _Row(
            entry.epoch,
            phases.get(entry.epoch - 1),
            shown_reward(entry.metrics),
            _distribution(entry),
            entry.metrics.get("episodes"),
            failed_counts(entry.metrics)[0],
            entry.metrics.get("cut_off_share"),
            entry.metrics.get("filtered_trajectories"),
            None if entry.version is None else f"v{entry.version.number}",
            shown_reward(validations[entry.epoch]) if entry.epoch in validations else None,
            entry.skipped or entry.resting or "; ".join(event.text for event in entry.alarms if event.is_new),
        )
        for entry in reversed(history.epochs)
    ]
    if 0 in validations:
        rows.append(
            _start(validations[0], "before training" if history.base is None else "after the warm-up")
        )
    if history.base is not None:
        rows.append(_start(history.base.metrics, "the base model, before the warm-up"))
    return rows
