"""Reading an answer in the usual format: `Decision: …` on a line of its own, or else a message."""

from __future__ import annotations

import re

from etude.protocols.act import Act, Malformed
from etude.protocols.turn import Turn

_DECISION = re.compile(
    r"^[^\S\n]*[>#*_\-\s]*(?:(?:my|the|final|verdict|and)\s+)*decision[\s*_]*:[\s*_]*(\S.*)?$",
    re.IGNORECASE | re.MULTILINE,
)
_SHOWN = 40


def parse_answer(text: str, turn: Turn) -> Act | Malformed:
    """What an answer does in a turn.

    Only a turn that may decide can decide, so that a prover may quote a decision. A decision stands on a
    line that starts with `Decision:`; what is said beside it is sent to nobody. An answer without one is
    the message on the turn's channel; where there are several, each has a part under its header.
    """
    said = text.strip()
    if turn.decide != "no":
        found = [match[1] or "" for match in _DECISION.finditer(said)]
        if found:
            return _decide(found, turn)
    if turn.decide == "must":
        return Malformed(f"no decision in a turn that must decide; it is written 'Decision: {_texts(turn)}'")
    if not said:
        return Malformed("an empty answer")
    if len(turn.writes) == 1:
        return Act({turn.writes[0]: said})
    return _split(said, turn)


def _decide(found: list[str], turn: Turn) -> Act | Malformed:
    values = {text: turn.scale.read(text) for text in found}
    unknown = next((text for text, value in values.items() if value is None), None)
    if unknown is not None:
        return Malformed(f"the decision {unknown[:_SHOWN]!r} is none of: {_texts(turn)}")
    if len(set(values.values())) > 1:
        return Malformed(f"several decisions: {', '.join(text[:_SHOWN] for text in values)}")
    return Act(decision=values[found[0]])


def _split(said: str, turn: Turn) -> Act | Malformed:
    """The parts of an answer, each from its header to the next."""
    starts: dict[str, re.Match[str]] = {}
    for channel, header in turn.parts:
        match = re.search(rf"^[^\S\n]*[#*_]*{re.escape(header)}[*_]*", said, re.IGNORECASE | re.MULTILINE)
        if match is None:
            return Malformed(f"no part that starts with '{header}'")
        starts[channel] = match
    ends = sorted([match.start() for match in starts.values()] + [len(said)])
    messages: dict[str, str] = {}
    for channel, header in turn.parts:
        match = starts[channel]
        message = said[match.end() : next(end for end in ends if end > match.start())].strip()
        if not message:
            return Malformed(f"nothing after '{header}'")
        messages[channel] = message
    return Act(messages)


def _texts(turn: Turn) -> str:
    """The decisions that a turn can bring, for a person."""
    texts = turn.scale.texts
    return " | ".join(texts) if len(texts) <= 7 else f"{texts[0]} … {texts[-1]}"
