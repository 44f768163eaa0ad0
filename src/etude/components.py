"""Everything that Etude ships under a `_type`: importing this module registers it.

Installed packages do the same: they name such a module under the entry-point group `etude.components`.
None of these modules needs torch before a component is built.
"""

# ruff: noqa: F401 - the imports are what this module is for

import etude.adapters.lm_server
import etude.adapters.local
import etude.adapters.openai_adapter
import etude.adapters.openpipe_art
import etude.builders.dpo
import etude.builders.expert_iteration
import etude.builders.grpo
import etude.builders.malt
import etude.epoch_trainer
import etude.inference.local
import etude.inference.openai_compatible
import etude.nat.components
import etude.protocols.config
import etude.rewards.components
import etude.rollout.datasets
import etude.rollout.workflow
import etude.scenarios.code_validation.components
