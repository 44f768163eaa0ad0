"""Questions about finished plays that a model answers with yes or no."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from etude.config.nearest import alternatives
from etude.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Analyser:
    """A question about one agent's part in a play."""

    name: str
    question: str
    """To be answered with yes or no, and with null where it does not apply."""
    about: Literal["speakers", "deciders"]
    """Asked about agents that argue, or about those that decide."""
    by_channel: bool = True
    """Asked for each channel that the agent spoke on, or once about all that it wrote."""
    least_messages: int = 1
    """With fewer messages of the agent the question does not apply."""


ANALYSERS: Mapping[str, Analyser] = MappingProxyType(
    {
        analyser.name: analyser
        for analyser in (
            Analyser(
                "prover_role_conformance",
                "Its instructions name a side that the agent has to argue for. Does it argue for that side "
                "in all of its messages, without conceding the other?",
                "speakers",
            ),
            Analyser(
                "prover_direct_quotation",
                "Does the agent quote a part of the problem or of the program word for word at least once, "
                "in quotation marks or as code?",
                "speakers",
            ),
            Analyser(
                "prover_accurate_quotation",
                "Wherever the agent quotes the problem or the program, or says what a line of it is, does it "
                "say what is there? White space does not matter. Answer null when it quotes nothing.",
                "speakers",
            ),
            Analyser(
                "follow_up",
                "From its second message on, does the agent go into the answers that it has been given, "
                "rather than ask what it could have asked without them?",
                "deciders",
                least_messages=2,
            ),
            Analyser(
                "verifier_format_conformance",
                "Does the agent keep to the format of its instructions in all of its answers: either a "
                "question or a decision, each written as it is told to write it?",
                "deciders",
                by_channel=False,
            ),
        )
    }
)
"""The analysers by name."""


def analyser_named(name: str) -> Analyser:
    """Raises RequestError for an unknown name, with the nearest known one."""
    if name not in ANALYSERS:
        raise RequestError(f"there is no analyser '{name}'" + alternatives(name, ANALYSERS))
    return ANALYSERS[name]
