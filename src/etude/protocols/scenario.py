"""A scenario: the task that a protocol is played on."""

from __future__ import annotations

from typing import Protocol

from etude.core.example import Example
from etude.core.message import Message
from etude.protocols.act import Act, Malformed
from etude.protocols.answer import parse_answer
from etude.protocols.decision import Verdict
from etude.protocols.log import Log
from etude.protocols.turn import Turn


class Scenario(Protocol):
    """Prompts, answers and the right verdicts of a task. All methods are pure functions.

    Subclass it to have `parse` and `stance`, or write a class with these four methods. It may have two more:

    - `write_decision(verdict, turn)` gives the answer that `parse` reads as a verdict, for guesses that are
      replaced. It takes one where neither `Decision:` and the turn's strongest word, nor that word alone,
      is read so.
    - `check_protocol(protocol)` raises RequestError for a protocol that the scenario cannot play. It is
      asked before the first play.
    """

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """The prompt of an agent's turn; `etude.protocols.dialogue` makes most of it."""
        ...

    def truth(self, example: Example) -> Verdict:
        """The right verdict: 0 reject, 1 accept."""
        ...

    def parse(self, text: str, turn: Turn) -> Act | Malformed:
        """What an answer does in its turn, or why it cannot."""
        return parse_answer(text, turn)

    def stance(self, example: Example) -> Verdict | None:
        """The verdict that provers argue for, where the protocol leaves it to the example.

        None, as by default, has it drawn for each play.
        """
        return None
