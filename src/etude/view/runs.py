"""The pages of runs: their list, and the overview of one with columns of data for its charts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from etude.config.document import value_at
from etude.core.history import Entry, History, Score
from etude.engines.ledger import load_bill
from etude.store.episodes import list_phases, phase_stage
from etude.store.facts import RunFacts, imported_lines, list_runs
from etude.store.figures import causes_in, failed_counts
from etude.store.histories import read_histories
from etude.store.run_folder import CONFIG_STEP, RunFolder
from etude.store.status import run_status
from etude.view.pages import facts_of_run, page, run_path


def list_page(request: Request) -> Response:
    """List all runs of the folder."""
    root: Path = request.app.state.root
    template = "runs_table.html" if request.query_params.get("part") == "table" else "runs.html"
    return page(request, template, runs=[*map(facts_of_run, list_runs(root))], root=root)


def run_page(request: Request) -> Response:
    """Show the overview of a run: its figures, charts, epochs and bill."""
    path = run_path(request)
    facts = facts_of_run(path)
    with RunFolder.read(path) as run:
        histories = read_histories(run.journal)
        bill = load_bill(run.journal)
        phases = list_phases(run.journal)
    entries = [entry for history in histories.values() for entry in history.entries]
    by_stage = {phase_stage(phase): phase for phase in reversed(phases)}
    models = []
    for name, history in histories.items():
        validations = {entry.epoch: entry for entry in history.validations}
        summary = facts.summary.targets.get(name or "")
        first = "before training" if history.base is None else "after the warm-up"
        rows = [
            (
                each,
                failed_counts(each.metrics)[0],
                validations.get(each.epoch),
                by_stage.get(("train", each.epoch)),
            )
            for each in reversed(history.epochs)
        ]
        model = {
            "name": name,
            "lines": () if summary is None else summary.lines(),
            "charts": list_charts(history),
            "rows": rows,
            "starts": {first: validations.get(0), "the base model, before the warm-up": history.base},
        }
        models.append(model)
    return page(
        request,
        "run_charts.html" if request.query_params.get("part") == "charts" else "run.html",
        lines=_facts(facts),
        warnings=facts.summary.warnings,
        models=models,
        causes=[*causes_in(entries), *((facts.result or {}).get("causes") or [])],
        bill=bill.by("model", "role"),
        **_live(path),
    )


def now_page(request: Request) -> Response:
    """Show the run's current work and waits, or only the line about them."""
    live = _live(run_path(request))
    if request.query_params.get("part") != "line":
        return page(request, "now.html", **live)
    answer = page(request, "live_line.html", **live)
    if request.query_params.get("done") != str(live["done"]):
        answer.headers["hx-trigger"] = "epochs"  # An epoch is over, so the charts are drawn again.
    return answer


def config_page(request: Request) -> Response:
    """Show the run's resolved config and its environment."""
    with RunFolder.read(run_path(request)) as run:
        environment, text = run.read_json("environment.json"), run.journal.get(CONFIG_STEP) or ""
    return page(request, "config.html", config=text, environment=environment)


def _live(path: Path) -> dict[str, Any]:
    facts = facts_of_run(path)
    return {"seen": run_status(path), "done": facts.epochs_done, "facts": facts}


def _facts(facts: RunFacts) -> list[tuple[str, str]]:
    lines = [("epochs", facts.shown_epochs), ("model", facts.model or facts.base), ("method", facts.method)]
    lines += [("backend", facts.backend)]
    known = [(label, text) for label, text in lines if text]
    if facts.kind == "import":
        return imported_lines(facts.result or {})
    if facts.kind == "evaluate":
        return [*known, ("reward", facts.first_and_last_reward[1] or "none yet")]
    return known if facts.summary.targets else [*known, *facts.summary.lines()]


Value: TypeAlias = float | None
Source: TypeAlias = str | tuple[str, str]
"""The dotted path of a metric, or of two whose ratio is drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: a number for each x, and its interval if there is one."""

    label: str
    values: list[Value]
    low: list[Value] | None = None
    high: list[Value] | None = None
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over epochs."""

    title: str
    x: list[int]
    lines: list[Curve]
    note: str = ""

    @property
    def in_words(self) -> str:
        """The chart as text, for users who cannot see it."""
        ends = [
            f"{line.label}: {known[0]:.4g} to {known[-1]:.4g}"
            for line in self.lines
            if (known := [value for value in line.values if value is not None])
        ]
        return f"{self.title} over epochs. " + "; ".join(ends)


def list_charts(history: History) -> dict[str, list[Chart]]:
    """Return the charts by group, without charts that have only zeros."""
    names = dict.fromkeys(name for entry in history.entries for name in entry.metrics.get("evaluators") or {})
    # A single evaluator is the reward.
    evaluators = names if len(names) > 1 else ()
    counts = {entry.epoch: entry.metrics.get("failures") or {} for entry in history.epochs}
    failures = {
        kind: {epoch: Score(mean=each.get(kind, 0)) for epoch, each in counts.items()}
        for kind in sorted({kind for each in counts.values() for kind in each})
    }
    groups = {
        "Rewards": [_score_chart(history, name) for name in (None, *evaluators)],
        **{group: [_metric(history, *each) for each in metrics] for group, metrics in _METRICS.items()},
        "Failures": [
            _chart(history, "failures by cause", failures, "episodes, and scores"),
            _metric(history, "calls made again", "calls.retries", ""),
        ],
    }
    drawn = {
        name: [chart for chart in charts if any(value for line in chart.lines for value in line.values)]
        for name, charts in groups.items()
    }
    return {name: charts for name, charts in drawn.items() if charts}


_METRICS: Mapping[str, tuple[tuple[str, Source, str], ...]] = {
    "Learning": (
        ("loss", "training.loss", "of the job's steps, on average"),
        ("KL to the reference", "training.reference_kl", "nats per token"),
        ("KL to the sampler", "training.sampled_kl", "nats per token, over the job's steps"),
        ("mismatch", "training.mismatch_kl", "learner against engine before the first step; nats per token"),
        ("clipped share", "training.clip_fraction", "of the trained tokens"),
        ("gradient norm", "training.grad_norm", "before clipping"),
        ("learning rate", "training.learning_rate", ""),
        ("accuracy", "training.accuracy", "of preferences"),
    ),
    "Sampling": (
        ("entropy", "sampled_entropy", "nats per sampled token"),
        ("length of answers", "answer_tokens", "tokens"),
        ("cut off", "cut_off_share", "share of the answers"),
        ("drift", ("drifted", "branches"), "share of the branches that a template began"),
        ("trained on", "filtered_trajectories", "trajectories"),
    ),
    "Speed": (
        ("sampled tokens per second", ("completion_tokens", "collecting_seconds"), ""),
        ("trained tokens per second", "training.tokens_per_s", ""),
        ("seconds of collecting", "collecting_seconds", ""),
        ("seconds of training", "training_seconds", ""),
    ),
}


def _metric(history: History, title: str, source: Source, note: str) -> Chart:
    known: dict[int, Score] = {}
    top, below = source if isinstance(source, tuple) else (source, None)
    for entry in history.epochs:
        value = value_at(entry.metrics, tuple(top.split(".")))
        whole = 1.0 if below is None else value_at(entry.metrics, (below,))
        # A custom adapter may give any value, and only numbers are drawn.
        if isinstance(value, int | float) and isinstance(whole, int | float) and whole:
            known[entry.epoch] = Score(mean=value / whole)
    return _chart(history, title, {title: known}, note)


def _score_chart(history: History, evaluator: str | None) -> Chart:
    """Chart an evaluator's scores, or the rewards. Episodes stand at the epochs their weights had trained."""

    def score(entry: Entry) -> Score:
        return entry.reward if evaluator is None else entry.evaluators.get(evaluator, Score())

    lines = {
        "training": {entry.epoch - 1: score(entry) for entry in history.epochs if not entry.resting},
        "validation": {entry.epoch: score(entry) for entry in history.validations},
    }
    dotted = "training" if history.validations else ""
    return _chart(history, evaluator or "reward", lines, "with 95 % intervals", dotted)


def _chart(
    history: History, title: str, lines: Mapping[str, Mapping[int, Score]], note: str, dotted: str = ""
) -> Chart:
    """Return a chart of lines, each with its known values by epoch."""
    x = list(range(max((entry.epoch for entry in history.entries), default=0) + 1))
    curves = []
    for label, known in lines.items():
        scores = [known.get(epoch, Score()) for epoch in x]
        if any(score.mean is not None for score in scores):
            ends = {"low": [score.low for score in scores], "high": [score.high for score in scores]}
            ends = ends if any(score.low is not None for score in scores) else {}
            curves.append(Curve(label, [score.mean for score in scores], is_dotted=label == dotted, **ends))
    return Chart(title, x, curves, note)
