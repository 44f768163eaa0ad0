"""Imported by the process that victims are forked from, so that they begin with what takes long in a run.

That is imports, tables that libraries make when a model is first loaded, and the search for entry points.
"""

from __future__ import annotations

import os
from pathlib import Path

from etude.config.load import load_config
from etude.models.policy import Policy
from tests.chaos.victim import FOLDER, MODULES

_folder = Path(os.environ[FOLDER])
for _name in Path(os.environ[MODULES]).read_text().split():
    try:
        __import__(_name)
    except ImportError:  # The project's own.
        continue
load_config(_folder / "config.yml")
Policy.load(_folder.parent / "base")
