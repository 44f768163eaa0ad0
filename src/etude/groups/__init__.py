"""Model groups: the agents that share one trainable model, and that model's versions."""

from etude.backends.lm_server import LanguageModelClient as LanguageModelClient
from etude.backends.state_folders import JobNameTakenError as JobNameTakenError
from etude.core.job import DryRun as DryRun
from etude.core.job import Frozen as Frozen
from etude.core.job import Skipped as Skipped
from etude.groups.agents import GroupAgent as GroupAgent
from etude.groups.agents import ModelSettings as ModelSettings
from etude.groups.agents import Step as Step
from etude.groups.agents import agents_of_model as agents_of_model
from etude.groups.model_jobs import ModelJobs as ModelJobs
from etude.groups.shared import OpenAiSharedModelGroup as OpenAiSharedModelGroup
from etude.groups.shared import OpenAiSharedModelGroupState as OpenAiSharedModelGroupState
from etude.groups.shared import SharedModelGroup as SharedModelGroup
from etude.groups.shared import SharedModelGroupState as SharedModelGroupState
