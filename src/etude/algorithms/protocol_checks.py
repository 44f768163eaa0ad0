"""Checks of the protocol that a config plays against its algorithm, before anything is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.algorithms.samples import EVERY_FUNCTION
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import RequestError
from etude.protocols.growing import Widths, branches
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


def _trained(played: ProtocolWorkflow, finetuning: FinetuneConfig) -> list[str]:
    """The agents whose answers are trained on: of the target's model, and by its functions."""
    functions = set(finetuning.target_functions)
    return [
        agent
        for agent, model in played.models.items()
        if functions & {agent, EVERY_FUNCTION} and model in (None, finetuning.target_model)
    ]
