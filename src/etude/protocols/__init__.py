"""Protocols: multi-agent exchanges as data, and how they are played."""

from __future__ import annotations

from etude.protocols.arrays import Rollouts
from etude.protocols.decision import (
    SCALES,
    AtLeast,
    Scale,
    Verdict,
    Vote,
    code_of,
    majority,
    mean_vote,
    unanimity,
)
from etude.protocols.growing import Widths, branching, most_calls
from etude.protocols.log import Line, Log, dialogue
from etude.protocols.named import (
    PROTOCOLS,
    adp,
    debate,
    merlin_arthur,
    mnip,
    nip,
    solo_verifier,
)
from etude.protocols.outcome import Outcome, PlayLog, Utterance
from etude.protocols.payoffs import ProofPayoff, Terms
from etude.protocols.protocol import Protocol
from etude.protocols.registry import ProtocolReward, find_protocol, find_scenario, register_scenario
from etude.protocols.rules import Fork, Role, Round, Turn
from etude.protocols.scenario import Act, Malformed, Scenario, parse_answer
from etude.protocols.transcripts import as_json, as_yaml, transcript
from etude.protocols.tree import Answer, Choice, EpisodeTree, Node, choices
from etude.protocols.workflow import ProtocolWorkflow, play

__all__ = [
    "PROTOCOLS",
    "SCALES",
    "Act",
    "Answer",
    "AtLeast",
    "Choice",
    "EpisodeTree",
    "Fork",
    "Line",
    "Log",
    "Malformed",
    "Node",
    "Outcome",
    "PlayLog",
    "ProofPayoff",
    "Protocol",
    "ProtocolReward",
    "ProtocolWorkflow",
    "Role",
    "Rollouts",
    "Round",
    "Scale",
    "Scenario",
    "Terms",
    "Turn",
    "Utterance",
    "Verdict",
    "Vote",
    "Widths",
    "adp",
    "as_json",
    "as_yaml",
    "branching",
    "choices",
    "code_of",
    "debate",
    "dialogue",
    "find_protocol",
    "find_scenario",
    "majority",
    "mean_vote",
    "merlin_arthur",
    "mnip",
    "most_calls",
    "nip",
    "parse_answer",
    "play",
    "register_scenario",
    "solo_verifier",
    "transcript",
    "unanimity",
]
