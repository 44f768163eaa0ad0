"""Model groups: the agents that share one trainable model, and that model's versions."""

from __future__ import annotations

from etude.backends.lm_client import LanguageModelClient
from etude.core.job import DryRun, Frozen, Skipped
from etude.groups.agents import GroupAgent, ModelSettings, Step, agents_of_model
from etude.groups.line import ModelLine
from etude.groups.openai_group import OpenAiSharedModelGroup, OpenAiSharedModelGroupState
from etude.groups.shared import SharedModelGroup
from etude.groups.state import SharedModelGroupState
from etude.jobs.folders import JobNameTakenError

__all__ = [
    "DryRun",
    "Frozen",
    "GroupAgent",
    "JobNameTakenError",
    "LanguageModelClient",
    "ModelLine",
    "ModelSettings",
    "OpenAiSharedModelGroup",
    "OpenAiSharedModelGroupState",
    "SharedModelGroup",
    "SharedModelGroupState",
    "Skipped",
    "Step",
    "agents_of_model",
]
