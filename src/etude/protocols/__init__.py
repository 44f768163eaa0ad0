"""Protocols: multi-agent exchanges as data, and how they are played."""

from __future__ import annotations

from etude.protocols.arrays import Rollouts
from etude.protocols.decision import SCALES, AtLeast, Scale, Verdict, majority, mean_vote, unanimity
from etude.protocols.growing import Widths, most_calls
from etude.protocols.named import adp, debate, merlin_arthur, mnip, nip, solo_verifier
from etude.protocols.protocol import Protocol
from etude.protocols.rules import Fork, Outcome, PlayLog, Role, Turn
from etude.protocols.scenario import Act, Line, Log, Malformed, Scenario, dialogue
from etude.protocols.tree import EpisodeTree, as_yaml, transcript
from etude.protocols.workflow import ProtocolWorkflow, find_protocol, play, register_scenario

__all__ = [
    "SCALES",
    "Act",
    "AtLeast",
    "EpisodeTree",
    "Fork",
    "Line",
    "Log",
    "Malformed",
    "Outcome",
    "PlayLog",
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
    "majority",
    "mean_vote",
    "merlin_arthur",
    "mnip",
    "most_calls",
    "nip",
    "play",
    "register_scenario",
    "solo_verifier",
    "transcript",
    "unanimity",
]
