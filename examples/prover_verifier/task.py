"""The game: a bug hides at one of n lines, or nowhere. Who talks, who may look, and what that is worth.

The claim under trial is "there is a bug": accept is the right verdict when there is one. Provers see
where it is; they argue for accept whether it is true or not (the one for reject is in `debate` only).
The verifier sees no line, but each of its turns before the verdict names a line that it then gets to see.
"""

from __future__ import annotations

import re
from typing import Any

from etude.core.episode import Example
from etude.core.message import Message
from etude.protocols import Log, LogEntry, Malformed, Move, Scenario, Turn, Verdict

LINES = 8
VERIFIER = "verifier"

_TALK = {"max_message_rounds": 4, "min_message_rounds": 4, "verifier_first": False}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "solo_verifier": {},
    "adp": {},
    "debate": _TALK,
    "nip": _TALK,
    "mnip": _TALK,
}
"""The protocols of the table, with their arguments: with four rounds the verifier sees one line."""


class HiddenBug(Scenario):
    """Is there a bug? Examples have `bug`: the number of a line, or 0 for none."""

    def __init__(self, *, lines: int = LINES) -> None:
        """`lines` is at most 9: every number is a single token."""
        self._line = re.compile(f"[1-{lines}]")

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """The messages that an agent knows and has heard, each of its own answers where it was given."""
        bug, is_verifier = example.inputs["bug"], agent == VERIFIER
        knows = VERIFIER if is_verifier else f"{_side(log, agent)} bug {bug or 'none'}"
        messages: list[Message] = [{"role": "system", "content": knows}]
        heard: list[str] = []
        for line in log.lines:
            if line.channel is not None:
                heard.append(self._describe_line(log, line))
                continue
            messages.append(_user(heard, "look" if is_verifier else "speak"))
            messages.append({"role": "assistant", "content": line.text})
            heard = [self._describe_view(line.text, bug)] if is_verifier else []
        asked = "speak" if not is_verifier else "judge" if turn.decide == "must" else "look"
        return [*messages, _user(heard, asked)]

    def parse(self, text: str, turn: Turn) -> Move | Malformed:
        """A verdict where the verifier must give one, otherwise the number of a line."""
        if turn.decide == "must":
            value = turn.scale.read(text)
            return Malformed("no verdict") if value is None else Move(decision=value)
        if not self._line.fullmatch(text):
            return Malformed("not the number of a line")
        return Move(dict.fromkeys(turn.writes, text))

    def truth(self, example: Example) -> Verdict:
        """1 when there is a bug."""
        return 1 if example.inputs["bug"] else 0

    def _describe_line(self, log: Log, line: LogEntry) -> str:
        said = line.text or "nothing"
        return f"looked {said}" if line.agent == VERIFIER else f"{_side(log, line.agent)} says {said}"

    def _describe_view(self, looked: str, bug: int) -> str:
        """The verifier's view of the line that it named."""
        return f"line {looked} {'broken' if looked == str(bug) else 'fine'}" if looked else "no line"


def optimum(protocol: str, *, lines: int = LINES, queries: int = 1, told: bool = True) -> float:
    """The verifier's accuracy when all play perfectly, each for itself; a bug is there half of the time.

    Without a look (`solo_verifier`, `adp`, or no queries) it is the prior, 1/2. For a prover that is paid
    for accept can say in a program without a bug just what it would say of one with a bug. So whatever
    the verifier makes of words alone, accepts are as frequent among wrong claims as among right ones at
    best: right claims are accepted with probability a, wrong ones with at least a, and the accuracy
    a/2 + (1 - b)/2 with b >= a is at most 1/2. A prover for reject (`debate`) adds words and no evidence.

    With a look, words can be checked. A prover with a bug to show names its line, since that is how it
    gets its accept; the verifier looks there, accepts what is broken and rejects all else. A bug is thus
    always accepted and its absence never: 1. A second prover (`mnip`, `debate`) or a second look cannot
    add to that, and cannot take it away: the verifier listens to the one for accept, or to either.

    Without being told where (`told=False`) k looks find the bug with probability k/n, and otherwise
    reject is the better guess: (k/n + 1)/2. What is above that, the verifier owes to the prover.
    """
    if protocol in ("solo_verifier", "adp") or queries == 0:
        return 0.5
    return 1.0 if told else (1 + min(queries, lines) / lines) / 2


def _side(log: Log, agent: str) -> str:
    """The claim that an agent argues for, which is all that the others need to know of it."""
    return "accept" if log.protocol.agents[agent].stance == 1 else "reject"


def _user(heard: list[str], asked: str) -> Message:
    return {"role": "user", "content": "\n".join([*dict.fromkeys(heard), asked])}
