"""The toolkit's agents as components here: importing this module registers them, and loads no toolkit."""

# ruff: noqa: F401 - the imports are what this module is for

import etude.integrations.nat.dataset
import etude.integrations.nat.evaluator
import etude.integrations.nat.workflow
