"""The built-in components: importing this module registers every `_type` of the core.

Installed packages and the integrations name such a module under the entry-point group `etude.components`.
Nothing here knows them. None of these modules needs torch before a component is built.
"""

import importlib
import pkgutil

import etude.algorithms
import etude.backends.local
import etude.backends.openai_jobs
import etude.engines.local
import etude.engines.openai_compatible
import etude.groups.opponents
import etude.loop.alarms
import etude.loop.arguments
import etude.loop.trainer
import etude.processes.ray_cluster
import etude.protocols.workflow
import etude.rollout.datasets
import etude.rollout.evaluator
import etude.rollout.judge
import etude.rollout.tools
import etude.rollout.workflow
import etude.show.otel
import etude.show.tracker_services
import etude.wire.logged_chats

for module in pkgutil.iter_modules(etude.algorithms.__path__, "etude.algorithms."):
    importlib.import_module(module.name)
