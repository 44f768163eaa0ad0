"""The alarm `judge_disagreement`: a judge prefers what a check refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from etude.alarms.alarm import Alarm, Sighting, Sightings
from etude.config.finetuning import FinetuneConfig
from etude.config.references import Refers
from etude.core.history import Entry


class JudgeDisagreement(Alarm, name="judge_disagreement"):
    """A judge and a check tell apart the attempts at an example, and not in the same way (`agreement` of the
    metrics).

    By default each evaluator that asks a model is compared with each other one that does not and whose scores
    are all 0 or 1. `judge` and `check` name two others.
    """

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "the model may be learning to please the judge: read episodes that the two see differently, and give "
        "the judge clearer criteria, or train on the check"
    )

    below: float = Field(default=0.5, gt=0, le=1)
    """The share of pairs of attempts that they have to see alike; 0.5 is chance."""
    pairs: int = Field(default=50, ge=1)
    """Pairs from which on the share counts."""
    judge: Annotated[str, Refers("evaluators")] | None = None
    """An entry of `eval.evaluators`."""
    check: Annotated[str, Refers("evaluators")] | None = None
    """An entry of `eval.evaluators`."""

    @model_validator(mode="after")
    def _names_both(self) -> JudgeDisagreement:
        if (self.judge is None) != (self.check is None):
            raise ValueError("name both `judge` and `check`, or neither")
        return self

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        figures = entry.metrics.get("agreement") or {}
        named = {
            f"{judge}, {check}": (judge, check, each)
            for judge, checks in figures.items()
            for check, each in checks.items()
            if (each["is_check"] if self.judge is None else (judge, check) == (self.judge, self.check))
            if each["pairs"] >= self.pairs
        }
        if not named:
            return None
        return {
            of: Sighting(
                f"'{judge}' and '{check}' see only {100 * each['share']:.0f} % of {each['pairs']} pairs of "
                "attempts alike"
            )
            for of, (judge, check, each) in named.items()
            if each["share"] < self.below
        }


def named_pairs(block: FinetuneConfig) -> list[tuple[str, str]]:
    """The judges and checks that alarms of a run name."""
    alarms = [each for each in block.alarms.values() if isinstance(each, JudgeDisagreement)]
    return [(each.judge, each.check) for each in alarms if each.judge is not None and each.check is not None]
