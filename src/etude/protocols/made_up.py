"""Made-up answers: what stands in a log for what nobody has said yet."""

from __future__ import annotations

from etude.protocols.combinations import Slot
from etude.protocols.rules import Rules
from etude.protocols.said import PlayLog, Utterance
from etude.protocols.turn import Schedule, Turn, rounds_at

WORDS = "…"


def answers_to(turn: Turn, number: int) -> list[Utterance]:
    """Every kind of answer that a turn in round `number` can bring: words, each decision, nothing usable."""
    said = Utterance(number, turn.agent, WORDS, dict.fromkeys(turn.writes, WORDS))
    decisions = [] if turn.decide == "no" else [decided(turn, number, value) for value in turn.scale.values]
    words = [] if turn.decide == "must" else [said]
    return [*words, *decisions, Utterance(number, turn.agent, malformed=True)]


def decided(turn: Turn, number: int, value: float, text: str = "") -> Utterance:
    """A decision, as others hear it."""
    return Utterance(number, turn.agent, text, ballot(turn, value), value)


def ballot(turn: Turn, value: float) -> dict[str, str]:
    """What others hear of a decision, by channel: nothing, unless the ballot is open."""
    return dict.fromkeys(turn.writes, f"Decision: {turn.scale.text_of(value)}") if turn.open else {}


def past_of(rules: Rules, schedule: Schedule, number: int, *, silent: bool = False) -> list[Slot]:
    """What can have been said before a round, one slot for each turn; the first answer of each is words.

    With a vote, the last turn of each voter has all of its decisions, and the others' have none: without
    one nobody has decided yet. When `silent`, nobody gave a usable answer, but for those who must. Where
    there were several rounds to choose from, it is the first that has turns.
    """
    turns = [
        (before, turn)
        for before, stage in enumerate(schedule[:number])
        for turn in next((turns for turns in rounds_at(stage) if turns), ())
    ]
    last = {turn.agent: index for index, (_, turn) in enumerate(turns) if turn.decide != "no"}
    slots: list[Slot] = []
    for index, (before, turn) in enumerate(turns):
        answers = answers_to(turn, before)
        if silent and not rules.agents[turn.agent].must_be_valid:
            slots.append(answers[-1:])
        elif rules.vote is not None and last.get(turn.agent) == index:
            slots.append(answers)
        else:
            slots.append(answers[:1] if turn.decide != "must" else answers[-1:])
    return slots


def has_words(log: PlayLog) -> bool:
    """Whether anything in a log was made up."""
    return any(said.text == WORDS for said in log)
