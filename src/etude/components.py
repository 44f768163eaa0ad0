"""Everything that Etude ships under a `_type`: importing this module registers it.

Installed packages do the same: they name such a module under the entry-point group `etude.components`.
None of these modules needs torch before a component is built.
"""

# ruff: noqa: F401 - the imports are what this module is for

import etude.algorithms.dpo
import etude.algorithms.expert_iteration
import etude.algorithms.grpo
import etude.algorithms.malt
import etude.backends.lm_server
import etude.backends.local
import etude.backends.openai_adapter
import etude.inference.local
import etude.inference.openai_compatible
import etude.integrations.art.openpipe_art
import etude.integrations.nat.components
import etude.loop.epoch_trainer
import etude.protocols.registry
import etude.rewards.components
import etude.rollout.datasets
import etude.rollout.workflow
import etude.scenarios.datasets
import etude.scenarios.measures
import etude.scenarios.scenario
