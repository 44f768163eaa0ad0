"""An agent's view of a play, and scenarios: the prompts, answer format and right verdicts of a task."""

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols.protocol import Protocol, Turn
from etude.protocols.tree import Node, Verdict, sign


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An answer or a message, as the log's reader sees it."""

    round: int
    agent: str
    channel: str | None
    """None for the reader's own answer, which it sees in full."""
    text: str
    """Empty for another agent's answer that stayed malformed."""


@dataclass(frozen=True, slots=True)
class Log:
    """Everything that an agent has said and heard before its turn, oldest first."""

    protocol: Protocol
    round: int
    """The round of the agent's turn, from 0."""
    lines: tuple[LogEntry, ...]
    stance: Verdict | None
    """The verdict that the agent argues for; None when it argues for neither."""
    turns_left: int
    """The agent's remaining turns after this one, if nobody ends the play early."""
    own_turns: int
    """The agent's turns in the longest possible play. The number is the same in all of its prompts."""


def agent_log(
    protocol: Protocol, path: Sequence[Node], agent: str, number: int, *, stance: Verdict, key: int
) -> Log:
    """Return the log that `agent` sees in round `number`, after the answers of `path`.

    The log holds only the channels that the agent reads. `key` is the key of the play.
    """
    schedule = protocol.rounds(key)
    channels = [channel for channel, readers in protocol.channels.items() if agent in readers]
    lines: list[LogEntry] = []
    for before, turns in enumerate(schedule[:number]):
        answers = [node for node in path if node.round == before]
        lines += [LogEntry(before, agent, None, node.text) for node in answers if node.agent == agent]
        order = [*channels]
        if protocol.shuffle_channels:
            generator(key, "channels", agent, before).shuffle(order)
        for channel in order:
            writers = {turn.agent for turn in turns if channel in turn.writes} - {agent}
            lines += [
                LogEntry(before, node.agent, channel, node.messages.get(channel, ""))
                for node in answers
                if node.agent in writers
            ]
    own = protocol.agents[agent].stance
    own_turns = [any(turn.agent == agent for turn in turns) for turns in schedule]
    return Log(
        protocol=protocol,
        round=number,
        lines=tuple(lines),
        stance=stance if own == "example" else own,
        turns_left=sum(own_turns[number + 1 :]),
        own_turns=sum(own_turns),
    )


OPENING = "Begin."
"""The user message for an agent that has heard nothing before its first turn."""
GO_ON = "Go on."
"""The user message for an agent that has heard nothing since its last turn."""
SILENCE = "(no usable answer)"
"""The text that replaces an answer that stayed malformed."""


def dialogue(log: Log, agent: str, system: str, *, last_words: str = "") -> list[Message]:
    """Return the system prompt, then the agent's own answers with the messages that it heard in between.

    `last_words` are added before its last turn. If `system` stays the same, each prompt starts with the
    agent's previous prompt and answer, so that training sees one sequence.
    """
    messages: list[Message] = [{"role": "system", "content": system}]
    heard: list[str] = []
    for line in log.lines:
        if line.channel is None:
            messages += [_user(heard, messages), {"role": "assistant", "content": line.text}]
            heard = []
        else:
            heard.append(_show_line(log, agent, line))
    if last_words and log.turns_left == 0:
        heard.append(last_words)
    return [*messages, _user(heard, messages)]


def _user(heard: list[str], before: list[Message]) -> Message:
    return {"role": "user", "content": "\n\n".join(heard) or (OPENING if len(before) == 1 else GO_ON)}


def _show_line(log: Log, agent: str, line: LogEntry) -> str:
    """Return a line with its speaker. If the speaker has several channels, name its readers too."""
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
class Move:
    """A well-formed answer."""

    messages: Mapping[str, str] = field(default_factory=dict)
    """The messages, by channel."""
    decision: float | None = None
    """From -1 (reject) to 1 (accept); None when the answer does not decide."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """An answer that cannot be used."""

    reason: str
    """The fault, written for a person."""


_DECISION = re.compile(
    r"^[^\S\n]*[>#*_\-\s]*(?:(?:my|the|final|verdict|and)\s+)*decision[\s*_]*:[\s*_]*(\S.*)?$",
    re.IGNORECASE | re.MULTILINE,
)
_SHOWN = 40


def parse_answer(text: str, turn: Turn) -> Move | Malformed:
    """Parse an answer in the usual format: `Decision: …` on a separate line, or else a message.

    Only a turn that may decide can decide, so that a prover may quote a decision. The rest of an answer
    that decides is sent to nobody. An answer without a decision is the message on the turn's channel. For
    several channels, it has one part for each, under the channel's header.
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
        return Move(decision=values[decisions[0]])
    if turn.decide == "must":
        return Malformed(f"no decision in a turn that must decide; it is written 'Decision: {_texts(turn)}'")
    if not answer:
        return Malformed("an empty answer")
    if len(turn.writes) == 1:
        return Move({turn.writes[0]: answer})
    # Each part runs from its header to the next header.
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
    return Move(messages)


def _texts(turn: Turn) -> str:
    texts = turn.scale.texts
    return " | ".join(texts) if len(texts) <= 7 else f"{texts[0]} … {texts[-1]}"


class Scenario(typing.Protocol):
    """The prompts, answer format and right verdicts of a task. All methods are pure functions.

    Subclass it to inherit `parse` and `stance`, or write a class with these four methods. One more method is
    optional: `write_decision(verdict, turn)` returns an answer that `parse` reads as the verdict, to replace
    guesses. Define it if `parse` accepts neither the scale's strongest word nor `Decision:` with that word.
    """

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """Return the prompt of an agent's turn; `etude.protocols.dialogue` builds most of it."""
        ...

    def truth(self, example: Example) -> Verdict:
        """Return the right verdict: 0 for reject, 1 for accept."""
        ...

    def parse(self, text: str, turn: Turn) -> Move | Malformed:
        """Return the messages and decision of an answer, or the reason why it cannot be used."""
        return parse_answer(text, turn)

    def stance(self, example: Example) -> Verdict | None:
        """Return the verdict that agents with the stance `example` argue for.

        None, the default, means that each play draws it.
        """
        return None


def answer_for(scenario: Scenario, turn: Turn, verdict: Verdict) -> str | None:
    """Return an answer that the scenario parses as this verdict, or None when no candidate parses so.

    The candidates are the result of `write_decision`, then the scale's strongest word for the verdict,
    after `Decision:` and alone.
    """
    word = turn.scale.strongest(verdict)
    write_decision = getattr(scenario, "write_decision", None)
    own: list[str] = [] if write_decision is None else [write_decision(verdict, turn)]
    for text in (*own, f"Decision: {word}", word):
        try:
            act = scenario.parse(text, turn)
        except Exception:  # noqa: BLE001  the user's code may raise on what is not in its format; the next is
            continue
        if isinstance(act, Move) and act.decision is not None and act.decision * sign(verdict) > 0:
            return text
    return None
