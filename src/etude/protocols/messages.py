"""A log as chat messages, the way most scenarios want it."""

from __future__ import annotations

from etude.core.message import Message
from etude.protocols.log import Line, Log

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
    heard: list[Line] = []
    for line in log.lines:
        if line.channel is None:
            messages.append(_user(log, agent, heard, first=len(messages) == 1))
            messages.append({"role": "assistant", "content": line.text})
            heard = []
        else:
            heard.append(line)
    closing = last_words if log.turns_left == 0 else ""
    return [*messages, _user(log, agent, heard, first=len(messages) == 1, closing=closing)]


def _user(log: Log, agent: str, heard: list[Line], *, first: bool, closing: str = "") -> Message:
    parts = [_shown(log, agent, line) for line in heard]
    if closing:
        parts.append(closing)
    return {"role": "user", "content": "\n\n".join(parts) or (OPENING if first else GO_ON)}


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
