"""Several runs over each other: their charts, what was set differently, and whether one did better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from etude.budget.bill import bill_of
from etude.core.errors import RequestError
from etude.report.run_lines import shown_epochs, shown_other_inputs, shown_state, side_by_side
from etude.store.comparison import (
    differing_settings,
    other_inputs,
    paired_difference,
    paired_differences,
)
from etude.store.figure_words import shown_difference
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.view.charts import Charted, charts_of
from etude.view.library import Library
from etude.view.pages import page

_MOST = 6
"""Runs, of which each has a colour."""


def compare_page(request: Request) -> Response:
    """The runs that are named by `run`, the first one being what the others are held against."""
    library: Library = request.app.state.library
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(names) <= _MOST:
        raise RequestError(f"choose two runs to compare, or up to {_MOST}; {len(names)} were chosen")
    paths = [library.find(name) for name in names]
    facts = [library.run(path).facts for path in paths]
    rows = [("state", *map(shown_state, facts)), ("epochs", *map(shown_epochs, facts)), *side_by_side(facts)]
    return page(
        request,
        "compare.html",
        names=names,
        rows=rows,
        settings=differing_settings(paths),
        verdicts=[*_verdicts(paths)],
        groups=charts_of([charted for path in paths for charted in _charted(path)]),
    )


def _charted(path: Path) -> Iterator[Charted]:
    with RunFolder.read(path) as run:
        bill = bill_of(run.journal)
        for target, history in histories(run.journal, run.name).items():
            yield Charted(path.name if target is None else f"{path.name} · {target}", history, bill)


def _verdicts(paths: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Run, evaluator, and by how much its scores are higher than those of the first, example by example."""
    first, *others = paths
    for path in others:
        reward, scores = paired_difference(first, path), paired_differences(first, path)
        if reward is not None:
            yield path.name, "reward", shown_difference(reward)
        for name, estimate in scores.items():
            yield path.name, name, shown_difference(estimate)
        if reward is None and not scores:
            yield (
                path.name,
                "reward",
                f"measured on fewer than two examples that {first.name} was measured on",
            )
        if apart := other_inputs(first, path):
            yield path.name, "examples", shown_other_inputs(apart)
