"""The log of a play as an agent sees it, and scenarios: the prompts, answers and right verdicts of a task."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols.decision import Verdict, sign
from etude.protocols.protocol import Protocol, Turn
from etude.protocols.tree import Node


@dataclass(frozen=True, slots=True)
class Line:
    """An answer or a message, as the reader of the log sees it."""

    round: int
    agent: str
    channel: str | None
    """None for an answer of the reader's own, which it sees in full."""
    text: str
    """Empty for an answer of another that stayed malformed, and so said nothing."""


@dataclass(frozen=True, slots=True)
class Log:
    """Everything that an agent has said and heard when it is its turn, oldest first."""

    protocol: Protocol
    round: int
    """The round that it speaks in, from 0."""
    lines: tuple[Line, ...]
    stance: Verdict | None
    """The verdict that it argues for; None when it argues for nothing."""
    turns_left: int
    """Turns that it can have after this one, if the play goes on to the end."""
    own_turns: int
    """Turns that it has in the longest possible play: the same number in all of its prompts."""


def log_of(
    protocol: Protocol, path: Sequence[Node], agent: str, number: int, *, stance: Verdict, key: int
) -> Log:
    """The log of `agent` in round `number` of the play with that key, after the answers of a path.

    It holds only the channels that the agent reads.
    """
    schedule = protocol.rounds(key)
    channels = [channel for channel, readers in protocol.channels.items() if agent in readers]
    lines: list[Line] = []
    for before, turns in enumerate(schedule[:number]):
        answers = [node for node in path if node.round == before]
        lines += [Line(before, agent, None, node.text) for node in answers if node.agent == agent]
        order = [*channels]
        if protocol.shuffle_channels:
            generator(key, "channels", agent, before).shuffle(order)
        for channel in order:
            writers = {turn.agent for turn in turns if channel in turn.writes} - {agent}
            lines += [
                Line(before, node.agent, channel, node.messages.get(channel, ""))
                for node in answers
                if node.agent in writers
            ]
    own_turns = [any(turn.agent == agent for turn in turns) for turns in schedule]
    return Log(
        protocol=protocol,
        round=number,
        lines=tuple(lines),
        stance=protocol.stance_of(agent, stance),
        turns_left=sum(own_turns[number + 1 :]),
        own_turns=sum(own_turns),
    )


OPENING = "Begin."
"""Said to an agent that has heard nothing before its first turn."""
GO_ON = "Go on."
"""Said to an agent that has heard nothing since its last turn."""
SILENCE = "(no usable answer)"
"""Stands for an answer that stayed malformed."""


def dialogue(log: Log, agent: str, system: str, *, last_words: str = "") -> list[Message]:
    """A system prompt, then the agent's own answers as they were, with what it heard in between.

    `last_words` are added before its last turn. Each prompt of an agent begins with its prompt before
    and the answer to that, provided that `system` is the same, so that training sees one sequence.
    """
    messages: list[Message] = [{"role": "system", "content": system}]
    heard: list[str] = []
    for line in log.lines:
        if line.channel is None:
            messages += [_user(heard, messages), {"role": "assistant", "content": line.text}]
            heard = []
        else:
            heard.append(_shown(log, agent, line))
    if last_words and log.turns_left == 0:
        heard.append(last_words)
    return [*messages, _user(heard, messages)]


def _user(heard: list[str], before: list[Message]) -> Message:
    nothing = OPENING if len(before) == 1 else GO_ON
    return {"role": "user", "content": "\n\n".join(heard) or nothing}


def _shown(log: Log, agent: str, line: Line) -> str:
    """A line with who said it and, where the speaker has several channels, to whom."""
    protocol = log.protocol
    text = line.text or SILENCE
    if protocol.agents[line.agent].anonymous:
        return text
    speaker = protocol.label(line.agent)
    written = [channel for channel in protocol.channels if line.agent in protocol.writers(channel)]
    if line.channel is None or len(written) < 2:
        return f"{speaker}: {text}"
    others = sorted(protocol.writers(line.channel) - {line.agent})
    to = " and ".join("you" if other == agent else protocol.label(other) for other in others)
    return f"{speaker} (to {to}): {text}"


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
        values = {text: turn.scale.read(text) for text in decisions}
        unknown = next((text for text, value in values.items() if value is None), None)
        if unknown is not None:
            return Malformed(f"the decision {unknown[:_SHOWN]!r} is none of: {_texts(turn)}")
        if len(set(values.values())) > 1:
            return Malformed(f"several decisions: {', '.join(text[:_SHOWN] for text in values)}")
        return Act(decision=values[decisions[0]])
    if turn.decide == "must":
        return Malformed(f"no decision in a turn that must decide; it is written 'Decision: {_texts(turn)}'")
    if not answer:
        return Malformed("an empty answer")
    if len(turn.writes) == 1:
        return Act({turn.writes[0]: answer})
    # The parts, each from its header to the next.
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


class Scenario(typing.Protocol):
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
