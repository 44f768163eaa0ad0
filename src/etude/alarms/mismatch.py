"""The alarm `mismatch`: the engine samples from another distribution than the learner has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.core.history import Entry


class Mismatch(Alarm, name="mismatch"):
    """The learner gives sampled tokens another probability than the engine that sampled them
    (`training.mismatch_kl` of the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "the gradient is of another policy than the one that acts. In bfloat16 it may be rounding: "
        "`dtype: float32` in the model's entry of `llms` ends that (up to 0.085 became less than 1e-4 with a "
        "model of 135M). `correction: truncate` of grpo, its default, bounds what it does to the gradient "
        "(whose cosine to the true one was 0.99, and 0.96 without). An engine elsewhere must have "
        "the same weights, precision and template"
    )

    above: float = Field(default=0.05, gt=0)
    """Nats a token that it may be. The two differ a little by rounding, and with `collect_ahead` by an
    update."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        divergence = (entry.metrics.get("training") or {}).get("mismatch_kl")
        if divergence is None:
            return None
        if divergence <= self.above:
            return ""
        return f"learner and engine differ by {divergence:.3g} nats a token (mismatch_kl)"
