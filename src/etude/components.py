"""The built-in components: importing this module registers every `_type` of the core.

Installed packages and the integrations name such a module under the entry-point group `etude.components`.
Nothing here knows them. None of these modules needs torch before a component is built.
"""

import importlib
import pkgutil

import etude.alarms
import etude.algorithms
import etude.backends.local
import etude.backends.openai_adapter
import etude.cluster.component
import etude.groups.opponents
import etude.inference.local
import etude.inference.openai_compatible
import etude.loop.arguments
import etude.loop.trainer
import etude.protocols.workflow
import etude.rewards.evaluator
import etude.rewards.judge
import etude.rollout.agent
import etude.rollout.datasets
import etude.rollout.tools
import etude.rollout.workflow
import etude.traces.importing
import etude.trackers.otel
import etude.trackers.record
import etude.trackers.services

for room in (etude.alarms, etude.algorithms):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
