"""Checks of the protocol that a config plays against its algorithm, before anything is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.algorithms.samples import EVERY_FUNCTION
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import RequestError
from etude.protocols.decision import VERDICTS, WORDS
from etude.protocols.growing import Widths, branches, most_calls
from etude.protocols.scenario import answer_for
from etude.protocols.workflow import ProtocolWorkflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


async def played_by(builder: Builder) -> ProtocolWorkflow | None:
    """The protocol that the config's workflow plays; None where it is another kind of agent."""
    if builder.config.workflow is None:
        return None
    played = (await builder.get_workflow()).fn
    return played if isinstance(played, ProtocolWorkflow) else None


async def require_branching(builder: Builder, widths: Widths | None, what: str, remedy: str) -> None:
    """Raises RequestError when no turn of a trained agent can have two answers, which `what` compares.

    `widths` are those of the builder; None leaves them to the workflow.
    """
    played = await played_by(builder)
    if played is None:
        return
    trained = _trained(played, builder.config.finetuning)
    if trained and not branches(played.protocol, widths or Widths.of(played.widths), trained):
        names = " and ".join(f"'{agent}'" for agent in trained)
        raise RequestError(
            f"{what} compares several answers to one prompt, and every turn of {names} in the protocol "
            f"'{played.protocol.name}' has one: nothing would be trained. {remedy}"
        )


async def require_calls(builder: Builder, widths: Widths | None) -> None:
    """Raises RequestError when a play with these widths can take more calls than an episode may."""
    played = await played_by(builder)
    if played is None or widths is None:
        return
    calls, most = most_calls(played.protocol, widths), builder.config.eval.general.max_calls
    if calls > most:
        raise RequestError(
            f"num_responses: a play of '{played.protocol.name}' can take {calls} calls, and "
            f"eval.general.max_calls is {most}; ask for fewer answers, also by agent and round, "
            "or raise the limit"
        )


async def require_guesses(builder: Builder) -> None:
    """Raises RequestError when the scenario reads no answer of a trained agent as one of the verdicts."""
    played = await played_by(builder)
    if played is None:
        return
    trained = _trained(played, builder.config.finetuning)
    deciding = [turn for turn in played.protocol.turns if turn.agent in trained and turn.decide != "no"]
    for turn in dict.fromkeys(deciding):
        for verdict in VERDICTS:
            if answer_for(played.scenario, turn, verdict) is None:
                raise RequestError(
                    f"guess_replacement: the scenario {type(played.scenario).__name__} reads no answer of "
                    f"'{turn.agent}' as {WORDS[verdict]}; give it a `write_decision(verdict, turn)` whose "
                    "text its `parse` reads"
                )


def _trained(played: ProtocolWorkflow, finetuning: FinetuneConfig) -> list[str]:
    """The agents whose answers are trained on: of the target's model, and by its functions."""
    functions = set(finetuning.target_functions)
    return [
        agent
        for agent, model in played.models.items()
        if functions & {agent, EVERY_FUNCTION} and model in (None, finetuning.target_model)
    ]
