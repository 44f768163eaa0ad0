"""Protocols: multi-agent exchanges as data, and how they are played."""

from etude.protocols.branching import most_calls as most_calls
from etude.protocols.catalog import adp as adp
from etude.protocols.catalog import debate as debate
from etude.protocols.catalog import merlin_arthur as merlin_arthur
from etude.protocols.catalog import mnip as mnip
from etude.protocols.catalog import nip as nip
from etude.protocols.catalog import solo_verifier as solo_verifier
from etude.protocols.protocol import SCALES as SCALES
from etude.protocols.protocol import Outcome as Outcome
from etude.protocols.protocol import Protocol as Protocol
from etude.protocols.protocol import Role as Role
from etude.protocols.protocol import Scale as Scale
from etude.protocols.protocol import Turn as Turn
from etude.protocols.scenario import Log as Log
from etude.protocols.scenario import LogEntry as LogEntry
from etude.protocols.scenario import Malformed as Malformed
from etude.protocols.scenario import Move as Move
from etude.protocols.scenario import Scenario as Scenario
from etude.protocols.scenario import dialogue as dialogue
from etude.protocols.tree import EpisodeTree as EpisodeTree
from etude.protocols.tree import Verdict as Verdict
from etude.protocols.workflow import ProtocolWorkflow as ProtocolWorkflow
from etude.protocols.workflow import find_protocol as find_protocol
from etude.protocols.workflow import play as play
