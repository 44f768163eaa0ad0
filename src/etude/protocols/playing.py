"""Playing a protocol once, outside of any run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.core.call import Sampling
from etude.core.errors import EpisodeError, RequestError
from etude.core.example import Example
from etude.core.interfaces import Engine
from etude.protocols.protocol import Protocol
from etude.protocols.scenario import Scenario
from etude.protocols.tree import EpisodeTree
from etude.protocols.widths import Width, Widths
from etude.protocols.workflow import RETRIES, ProtocolWorkflow
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal


async def play(
    protocol: Protocol,
    scenario: Scenario,
    policies: Mapping[str, Engine],
    example: Example,
    *,
    widths: Widths | Width | Mapping[str, Width] = 1,
    retries: int = RETRIES,
    seed: int = 0,
    sampling: Mapping[str, Mapping[str, Any]] | None = None,
) -> EpisodeTree:
    """Play a protocol on one example, each agent with its engine. Nothing is kept.

    Width 1 is a rollout, k branches at every answer, `[k, 1]` at the first; by agent where widths are a
    mapping. For many examples, or a run that can be resumed, hand a `ProtocolWorkflow` to a `Collector`.
    Raises RequestError for what does not fit the protocol, EpisodeError when the play failed.
    """
    missing = [agent for agent in protocol.agents if agent not in policies]
    if missing:
        raise RequestError(f"policies: no engine for the agent '{missing[0]}' of '{protocol.name}'")
    workflow = ProtocolWorkflow(
        protocol,
        scenario,
        {agent: agent for agent in policies},
        widths,
        retries=retries,
        sampling=sampling or {},
        seed=seed,
    )
    limits = Limits(max_concurrency=1, timeout=None, max_calls=None)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "play.db") as journal:
        models = {agent: Sampling() for agent in policies}
        collector = Collector(
            as_workflow(workflow), policies, journal, seed=seed, limits=limits, sampling=models
        )
        record = await collector.run(EpisodeJob(f"play/{example.id}/0", example))
    if record.failure is not None:
        raise EpisodeError(f"the play on example '{example.id}' failed: {record.failure.reason}")
    return EpisodeTree.from_json(record.output)
