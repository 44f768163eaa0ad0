"""Scenarios: the prompts, answers and right verdicts of the task that a protocol is played on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from etude.core.example import Example
from etude.core.message import Message
from etude.protocols.decision import Verdict, sign
from etude.protocols.log import Log
from etude.protocols.rules import Turn


@dataclass(frozen=True, slots=True)
class Act:
    """A well-formed answer."""

    messages: Mapping[str, str] = field(default_factory=dict)
    """Its messages, by channel."""
    decision: float | None = None
    """In [-1, 1], from reject to accept; None when it does not decide."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """An answer that cannot be used."""

    reason: str
    """For a person."""


_DECISION = re.compile(
    r"^[^\S\n]*[>#*_\-\s]*(?:(?:my|the|final|verdict|and)\s+)*decision[\s*_]*:[\s*_]*(\S.*)?$",
    re.IGNORECASE | re.MULTILINE,
)
_SHOWN = 40


def parse_answer(text: str, turn: Turn) -> Act | Malformed:
    """Read an answer in the usual format: `Decision: …` on a line of its own, or else a message.

    Only a turn that may decide can decide, so that a prover may quote a decision. The text beside a
    decision is sent to nobody. An answer without a decision is the message on the turn's channel; where
    there are several channels, each has a part under its header.
    """
    answer = text.strip()
    decisions = [] if turn.decide == "no" else [match[1] or "" for match in _DECISION.finditer(answer)]
    if decisions:
        return _decide(decisions, turn)
    if turn.decide == "must":
        return Malformed(f"no decision in a turn that must decide; it is written 'Decision: {_texts(turn)}'")
    if not answer:
        return Malformed("an empty answer")
    return Act({turn.writes[0]: answer}) if len(turn.writes) == 1 else _split(answer, turn)


def _decide(decisions: list[str], turn: Turn) -> Act | Malformed:
    values = {text: turn.scale.read(text) for text in decisions}
    unknown = next((text for text, value in values.items() if value is None), None)
    if unknown is not None:
        return Malformed(f"the decision {unknown[:_SHOWN]!r} is none of: {_texts(turn)}")
    if len(set(values.values())) > 1:
        return Malformed(f"several decisions: {', '.join(text[:_SHOWN] for text in values)}")
    return Act(decision=values[decisions[0]])


def _split(answer: str, turn: Turn) -> Act | Malformed:
    """The parts of an answer, each from its header to the next."""
    headings: list[re.Match[str]] = []
    for _, header in turn.parts:
        match = re.search(rf"^[^\S\n]*[#*_]*{re.escape(header)}[*_]*", answer, re.IGNORECASE | re.MULTILINE)
        if match is None:
            return Malformed(f"no part that starts with '{header}'")
        headings.append(match)
    ends = sorted([heading.start() for heading in headings] + [len(answer)])
    messages: dict[str, str] = {}
    for (channel, header), heading in zip(turn.parts, headings, strict=True):
        messages[channel] = answer[heading.end() : next(end for end in ends if end > heading.start())].strip()
        if not messages[channel]:
            return Malformed(f"nothing after '{header}'")
    return Act(messages)


def _texts(turn: Turn) -> str:
    """The decisions that a turn can bring, for a person."""
    texts = turn.scale.texts
    return " | ".join(texts) if len(texts) <= 7 else f"{texts[0]} … {texts[-1]}"


class Scenario(Protocol):
    """Prompts, answers and the right verdicts of a task. All methods are pure functions.

    Subclass it to have `parse` and `stance`, or write a class with these four methods. It may have two more:

    - `write_decision(verdict, turn)` gives the answer that `parse` reads as a verdict, for guesses that are
      replaced. It is needed where `parse` takes neither `Decision:` with the scale's strongest word, nor
      that word alone, for the verdict.
    - `check_protocol(protocol)` raises RequestError for a protocol that the scenario cannot play. It is
      called before the first play.
    """

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """The prompt of an agent's turn; `etude.protocols.dialogue` makes most of it."""
        ...

    def truth(self, example: Example) -> Verdict:
        """The right verdict: 0 reject, 1 accept."""
        ...

    def parse(self, text: str, turn: Turn) -> Act | Malformed:
        """Read an answer: its messages and decision in the turn, or why it cannot be used."""
        return parse_answer(text, turn)

    def stance(self, example: Example) -> Verdict | None:
        """The verdict that provers argue for, where the protocol leaves it to the example.

        None, as by default, has it drawn for each play.
        """
        return None


def answer_for(scenario: Scenario, turn: Turn, verdict: Verdict) -> str | None:
    """An answer that the scenario reads as this verdict, without reserve; None when it reads none so.

    It is what the scenario writes, or else the last word of the turn's scale, after `Decision:` or alone.
    """
    word = turn.scale.strongest(verdict)
    write_decision = getattr(scenario, "write_decision", None)
    own: list[str] = [] if write_decision is None else [write_decision(verdict, turn)]
    for text in (*own, f"Decision: {word}", word):
        try:
            act = scenario.parse(text, turn)
        except Exception:  # noqa: BLE001  the user's code may raise on what is not in its format; the next is
            continue
        if isinstance(act, Act) and act.decision is not None and act.decision * sign(verdict) > 0:
            return text
    return None
