"""The toolkit's agents as components here: importing this module registers them, and loads no toolkit."""

# ruff: noqa: F401 - the imports are what this module is for

import etude.nat.dataset
import etude.nat.evaluator
import etude.nat.workflow
