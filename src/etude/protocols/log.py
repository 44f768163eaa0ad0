"""The log of a play as one agent sees it, and as the chat messages of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols.decision import Verdict
from etude.protocols.outcome import PlayLog, Utterance
from etude.protocols.protocol import Protocol
from etude.protocols.rules import Round, chosen, drawn_side, turns_at
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
    lines: list[Line] = []
    for before in range(number):
        answers = [node for node in path if node.round == before]
        if not answers:
            continue
        turns = chosen(schedule[before], play_log([node for node in path if node.round < before]))
        lines += [Line(before, agent, None, node.text) for node in answers if node.agent == agent]
        channels = [channel for channel, readers in protocol.channels.items() if agent in readers]
        if protocol.shuffle_channels:
            generator(key, "channels", agent, before).shuffle(channels)
        for channel in channels:
            lines += _heard(turns, answers, agent, channel)
    possible = [any(turn.agent == agent for turn in turns_at(stage)) for stage in schedule]
    return Log(
        protocol=protocol,
        round=number,
        lines=tuple(lines),
        stance=protocol.stance_of(agent, stance, drawn_side(key)),
        turns_left=sum(possible[number + 1 :]),
        own_turns=sum(possible),
    )


def play_log(path: Sequence[Node]) -> PlayLog:
    """Everything that was said on a path from the root."""
    return PlayLog(
        tuple(
            Utterance(n.round, n.agent, n.text, n.messages, n.decision, malformed=n.malformed is not None)
            for n in path
        )
    )


def _heard(turns: Round, answers: Sequence[Node], reader: str, channel: str) -> list[Line]:
    """The lines of others on a channel in a round. A secret ballot has none."""
    writers = {turn.agent for turn in turns if channel in turn.writes} - {reader}
    return [
        Line(node.round, node.agent, channel, node.messages.get(channel, ""))
        for node in answers
        if node.agent in writers and (node.decision is None or channel in node.messages)
    ]


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
