"""Agreement of two evaluators: whether they prefer the same of two attempts at an example."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput

_ATTEMPTS = 64
"""Of one example that are compared, so that an epoch of few examples with many episodes takes no longer."""


def agreements(output: EvaluationRunOutput, pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For pairs of evaluators, a judge and a check: how often the judge sees two attempts as the check does.

    By judge and by check: `share`, over the `pairs` of attempts at one example to which the check gives
    different scores, of those that the judge scores the same way round, where a tie counts half; and whether
    the check `is_check`: all of its scores are 0 or 1. Pairs of evaluators that tell nothing are left out.
    """
    results = dict(output.evaluation_results)
    figures: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for judge, check in pairs:
        if judge in results and check in results:
            judged, checked = results[judge].eval_output_items, results[check].eval_output_items
            if (figure := _agreement(judged, checked)) is not None:
                figures[judge][check] = figure
    return dict(figures)


def _agreement(judged: Sequence[EvalOutputItem], checked: Sequence[EvalOutputItem]) -> dict[str, Any] | None:
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    scores = set()
    for judged_item, checked_item in zip(judged, checked, strict=True):
        if judged_item.is_scored and checked_item.is_scored:
            assert judged_item.score is not None and checked_item.score is not None
            groups[checked_item.id].append((judged_item.score, checked_item.score))
            scores.add(checked_item.score)
    alike, count = 0.0, 0
    for group in groups.values():
        for (judgement, check), (other, other_check) in combinations(group[:_ATTEMPTS], 2):
            if check != other_check:
                count += 1
                same_way = (judgement > other) == (check > other_check)
                alike += 0.5 if judgement == other else float(same_way)
    if not count:
        return None
    return {"share": alike / count, "pairs": count, "is_check": scores <= {0.0, 1.0}}
