"""The workflow that plays a protocol: episodes of many agents, on the path that all episodes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.config.nearest import alternatives
from etude.core.call import Sampling
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.keys import fold
from etude.protocols.asking import Asker
from etude.protocols.growing import Play, grow
from etude.protocols.protocol import Protocol
from etude.protocols.scenario import Scenario
from etude.protocols.widths import Width, Widths, wanted_widths
from etude.rollout.episode import Episode
from etude.wire.sampling import change_sampling

RETRIES = 3
"""How often a malformed answer is asked for again, by default."""


@dataclass(frozen=True, repr=False)
class ProtocolWorkflow:
    """A workflow that plays a protocol on an example; its output is the episode tree as JSON.

    The calls of an agent are those of the function with its name. Raises RequestError for agents that
    the protocol does not have, and for impossible widths or sampling.
    """

    protocol: Protocol
    scenario: Scenario
    policies: Mapping[str, str] | str | None = None
    """The entry of `llms` that each agent samples from: by agent, one for all, or the default model."""
    widths: Widths | Width | Mapping[str, Width] = 1
    """How many answers are sampled for each turn; see `Widths.of`."""
    retries: int = RETRIES
    """How often a malformed answer is asked for again before it counts."""
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sampling parameters by agent, over those of its model."""
    seed: int = 0
    """Of the schedule and the order of channels, where a protocol draws them."""

    def __post_init__(self) -> None:
        """Check what can be checked before the first call."""
        agents = self.protocol.agents
        object.__setattr__(self, "widths", Widths.of(self.widths))
        self._widths.check_agents(agents)
        for what, by_agent in (("policies", self.policies), ("sampling", self.sampling)):
            for agent in by_agent if isinstance(by_agent, Mapping) else ():
                if agent not in agents:
                    where = f"protocol '{self.protocol.name}' has no agent '{agent}'"
                    raise RequestError(f"{what}: {where}" + alternatives(agent, agents))
        missing = [agent for agent in agents if self.models.get(agent, "") is None]
        if missing and isinstance(self.policies, Mapping):
            raise RequestError(f"policies: no model for the agent '{missing[0]}'; name an entry of `llms`")
        if self.retries < 0:
            raise RequestError(f"retries must be at least 0, found {self.retries}")
        # Not every scenario has it; see `Scenario`.
        check = getattr(self.scenario, "check_protocol", None)
        if check is not None:
            check(self.protocol)
        for changes in self.sampling.values():
            change_sampling(Sampling(), changes)

    async def __call__(self, example: Example, episode: Episode) -> Any:
        """Play once. Raises as `grow` does, and RequestError for a `branching` of unknown agents."""
        widths = wanted_widths() or self._widths
        widths.check_agents(self.protocol.agents)
        play = Play(
            self.protocol,
            self.scenario,
            example,
            widths,
            key=fold(self.seed, _group_of(episode), "play"),
        )
        asker = Asker(episode, self.scenario, self.models, retries=self.retries, sampling=self.sampling)
        return (await grow(play, asker)).to_json()

    def __repr__(self) -> str:
        return f"<protocol {self.protocol.name}>"

    @property
    def _widths(self) -> Widths:
        return Widths.of(self.widths)

    @property
    def models(self) -> dict[str, str | None]:
        """The entry of `llms` that each agent samples from; None for the default model."""
        policies = self.policies
        if isinstance(policies, Mapping):
            return {agent: policies.get(agent) for agent in self.protocol.agents}
        return dict.fromkeys(self.protocol.agents, policies)


def _group_of(episode: Episode) -> str:
    """What the episodes of an example have in common: they play the same schedule, to be compared."""
    return episode.id.removesuffix(f"/{episode.generation}")
