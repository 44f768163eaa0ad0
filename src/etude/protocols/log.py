"""The log of a play as one agent sees it: all that its prompt may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.keys import generator
from etude.protocols.decision import Verdict
from etude.protocols.protocol import Protocol
from etude.protocols.resolving import chosen
from etude.protocols.rules import drawn_side
from etude.protocols.said import PlayLog, Utterance
from etude.protocols.tree import Node
from etude.protocols.turn import Fork, Round, Stage, turns_at


@dataclass(frozen=True, slots=True)
class Line:
    """Something that was said."""

    round: int
    agent: str
    channel: str | None
    """None for an answer of the reader's own, which it sees whole."""
    text: str
    """Empty for an answer of another that stayed malformed, and so said nothing."""


@dataclass(frozen=True, slots=True)
class Log:
    """What an agent has said and heard when it is its turn, oldest first."""

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
    protocol: Protocol,
    rounds: Sequence[Stage],
    path: Sequence[Node],
    agent: str,
    number: int,
    *,
    stance: Verdict,
    key: int,
) -> Log:
    """The log of `agent` in round `number` of a schedule, after the answers of a path from the root.

    Only channels that it reads are in it. `key` is that of the play.
    """
    lines: list[Line] = []
    for before in range(number):
        answers = [node for node in path if node.round == before]
        if not answers:
            continue
        turns = _turns_of(rounds[before], path, before)
        lines += [Line(before, agent, None, node.text) for node in answers if node.agent == agent]
        for channel in _order(protocol, agent, before, key):
            lines += _heard(turns, answers, agent, channel)
    possible = [any(turn.agent == agent for turn in turns_at(stage)) for stage in rounds]
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
            Utterance(
                node.round,
                node.agent,
                node.text,
                node.messages,
                node.decision,
                malformed=node.malformed is not None,
            )
            for node in path
        )
    )


def _turns_of(stage: Stage, path: Sequence[Node], number: int) -> Round:
    """The turns that were taken in round `number`."""
    if not isinstance(stage, Fork):
        return stage
    return chosen(stage, play_log([node for node in path if node.round < number]))


def _heard(turns: Round, answers: Sequence[Node], reader: str, channel: str) -> list[Line]:
    """What others said on a channel in a round. Of a secret ballot nothing is heard."""
    writers = {turn.agent for turn in turns if channel in turn.writes} - {reader}
    return [
        Line(node.round, node.agent, channel, node.messages.get(channel, ""))
        for node in answers
        if node.agent in writers and (node.decision is None or channel in node.messages)
    ]


def _order(protocol: Protocol, reader: str, number: int, key: int) -> list[str]:
    """The channels that an agent reads, in the order in which it reads those of a round."""
    channels = [channel for channel, readers in protocol.channels.items() if reader in readers]
    if protocol.shuffle_channels:
        generator(key, "channels", reader, number).shuffle(channels)
    return channels
