"""Protocols: multi-agent exchanges as data, and how they are played."""

from __future__ import annotations

from etude.protocols.arrays import Rollouts
from etude.protocols.decision import SCALES, Scale, Verdict
from etude.protocols.growing import Widths, most_calls
from etude.protocols.named import adp, debate, merlin_arthur, mnip, nip, solo_verifier
from etude.protocols.protocol import Outcome, Protocol, Role, Turn
from etude.protocols.scenario import Act, Line, Log, Malformed, Scenario, dialogue
from etude.protocols.tree import EpisodeTree, as_yaml, transcript
from etude.protocols.workflow import ProtocolWorkflow, find_protocol, play

__all__ = [
    "SCALES",
    "Act",
    "EpisodeTree",
    "Line",
    "Log",
    "Malformed",
    "Outcome",
    "Protocol",
    "ProtocolWorkflow",
    "Role",
    "Rollouts",
    "Scale",
    "Scenario",
    "Turn",
    "Verdict",
    "Widths",
    "adp",
    "as_yaml",
    "debate",
    "dialogue",
    "find_protocol",
    "merlin_arthur",
    "mnip",
    "most_calls",
    "nip",
    "play",
    "solo_verifier",
    "transcript",
]
