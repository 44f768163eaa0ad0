"""Protocols with several deciders, rounds chosen by what was said, payoffs that read it, and no verdict."""

from __future__ import annotations

from typing import Any

from etude.core.call import ChatRequest
from etude.core.example import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols import (
    SCALES,
    Act,
    AtLeast,
    Fork,
    Log,
    Malformed,
    Outcome,
    PlayLog,
    Protocol,
    Role,
    Turn,
    dialogue,
    majority,
    mean_vote,
    unanimity,
)
from tests.protocols.games import Labelled, agent_of
from tests.support import ScriptedEngine

JURORS = ("ann", "bob", "cid")
RULES: dict[str, Any] = {
    "majority": majority,
    "unanimity": unanimity,
    "mean": mean_vote,
    "two": AtLeast(2),
}


def pay_jury(outcome: Outcome) -> dict[str, float]:
    """Each juror 1 for a right ballot, 0 for none, -1 for a wrong one; 2 to all for a right verdict."""
    if not outcome.over:
        return {}
    right = 1 if outcome.truth else -1
    shared = 0.0 if outcome.decision is None else 2.0 * outcome.decision * right
    own = {juror: outcome.ballots.get(juror, 0.0) * right for juror in JURORS}
    return {juror: own[juror] + shared for juror in JURORS}


def jury(vote: Any = "majority", rounds: int = 1, *, scale: str = "accept_reject", **fields: Any) -> Protocol:
    """Three jurors vote at the same time, behind closed doors, up to `rounds` times."""
    ballot = tuple(Turn(juror, decide="must", scale=SCALES[scale]) for juror in JURORS)
    given: dict[str, Any] = {
        "name": "jury",
        "agents": {juror: Role("juror", may_decide=True) for juror in JURORS},
        "channels": {},
        "schedules": ((ballot,) * rounds,),
        "payoff": pay_jury,
        "bounds": dict.fromkeys(JURORS, (-3.0, 3.0)),
        "vote": RULES.get(vote, vote),
    }
    return Protocol(**given | fields)


def roll_call(vote: str = "majority") -> Protocol:
    """The jurors vote one after the other, aloud."""
    turns = [Turn(juror, ("room",), "must", open=True) for juror in JURORS]
    return jury(vote, channels={"room": frozenset(JURORS)}, schedules=(tuple((turn,) for turn in turns),))


def deliberation(rounds: int = 3) -> Protocol:
    """Each juror speaks or votes, secretly; whoever has voted keeps its ballot while it speaks."""
    talk = tuple(Turn(juror, (f"of_{juror}",), "may") for juror in JURORS)
    end = tuple(Turn(juror, decide="must") for juror in JURORS)
    channels = {f"of_{juror}": frozenset(JURORS) for juror in JURORS}
    return jury("unanimity", channels=channels, schedules=((talk,) * (rounds - 1) + (end,),))


def is_called(log: PlayLog) -> str:
    """The witness that the judge named last, or nobody."""
    judge = log.last("judge")
    named = "" if judge is None else judge.messages.get("court", "")
    return next((name for name in ("expert", "neighbour") if name in named), "nobody")


def hearing(rounds: int = 2, *, choose: Any = is_called) -> Protocol:
    """The judge calls a witness, or nobody, up to `rounds` times; only the expert is heard in private."""
    call = (Turn("judge", ("court",), "may"),)
    witness = Fork(
        choose,
        {
            "expert": (Turn("expert", ("chamber",)),),
            "neighbour": (Turn("neighbour", ("court",)),),
            "nobody": (),
        },
    )
    return Protocol(
        name="hearing",
        agents={
            "judge": Role("verifier", may_decide=True),
            "expert": Role("witness", stance="drawn"),
            "neighbour": Role("witness", stance="opposed"),
        },
        channels={
            "court": frozenset({"judge", "expert", "neighbour"}),
            "chamber": frozenset({"judge", "expert"}),
        },
        schedules=((call, witness) * rounds + ((Turn("judge", decide="must"),),),),
        payoff=lambda outcome: (
            {"judge": -0.25 if outcome.decider else 0.0}
            if outcome.decision is None
            else {
                "judge": outcome.decision * (1 if outcome.truth else -1),
                "expert": outcome.decision * (1 if outcome.sides["expert"] else -1),
                "neighbour": outcome.decision * (1 if outcome.sides["neighbour"] else -1),
            }
        ),
    )


def pay_deal(outcome: Outcome) -> dict[str, float]:
    """Whoever sells earns the last offer that was answered with `deal`; each offer costs a tenth."""
    costs = {one.agent: -0.1 for one in outcome.log if one.round == outcome.log.utterances[-1].round}
    last = outcome.log.utterances[-1]
    if "deal" not in last.messages.get("table", ""):
        return costs
    offers = [int(text) for text in outcome.log.on("table") if text.isdecimal()]
    price = offers[-1] / 10 if offers else 0.0
    return {"seller": price, "buyer": 1 - price}


def bargain(rounds: int = 4, **fields: Any) -> Protocol:
    """Seller and buyer make offers in turn, until one says `deal` or the rounds are over. Nobody decides."""

    def goes_on(log: PlayLog) -> str:
        return "over" if any("deal" in text for text in log.on("table")) else "offer"

    def turn(agent: str) -> Fork:
        return Fork(goes_on, {"offer": (Turn(agent, ("table",)),), "over": ()})

    given: dict[str, Any] = {
        "name": "bargain",
        "agents": {"seller": Role("trader"), "buyer": Role("trader")},
        "channels": {"table": frozenset({"seller", "buyer"})},
        "schedules": (tuple(turn(("seller", "buyer")[number % 2]) for number in range(rounds)),),
        "payoff": pay_deal,
        "bounds": {"seller": (-0.3, 1.0), "buyer": (-0.3, 1.0)},
        "needs_verdict": False,
    }
    return Protocol(**given | fields)


class Offers(Labelled):
    """Only whole numbers from 0 to 10 and `deal` are said in a bargain."""

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        return dialogue(log, agent, f"You are {agent}. {example.id}")

    def parse(self, text: str, turn: Turn) -> Act | Malformed:
        known = text == "deal" or (text.isdecimal() and int(text) <= 10)
        return Act({turn.writes[0]: text}) if known else Malformed("neither an offer nor a deal")


class Crowd(ScriptedEngine):
    """Says something fitting by chance, whatever the protocol; by the request's key alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(self._answer_by_chance, slowly=True, **settings)

    def _answer_by_chance(self, request: ChatRequest) -> str:
        random = generator(request.key, "answer")
        if agent_of(request) in ("seller", "buyer"):
            return random.choice(["", "deal", *map(str, range(11))])
        decided = [f"Decision: {verdict}" for verdict in ("accept", "reject")]
        return random.choice([*decided, "", "I call the expert", "I call the neighbour", "no, nobody"])
