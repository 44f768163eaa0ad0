"""The right guess: the answer that would have given the right verdict in a turn that may decide."""

from __future__ import annotations

from etude.protocols.act import Act
from etude.protocols.decision import Verdict, sign
from etude.protocols.scenario import Scenario
from etude.protocols.turn import Turn


def answer_for(scenario: Scenario, turn: Turn, verdict: Verdict) -> str | None:
    """An answer that the scenario reads as this verdict, without reserve; None when it reads none so.

    It is what the scenario writes, or else the last word of the turn's scale, after `Decision:` or alone.
    """
    word = turn.scale.strongest(verdict)
    # Not every scenario has it; see `Scenario`.
    written = getattr(scenario, "write_decision", None)
    own: list[str] = [] if written is None else [written(verdict, turn)]
    for text in (*own, f"Decision: {word}", word):
        try:
            act = scenario.parse(text, turn)
        except Exception:  # noqa: BLE001  the user's code may raise on what is not in its format; the next is
            continue
        if isinstance(act, Act) and act.decision is not None and act.decision * sign(verdict) > 0:
            return text
    return None
