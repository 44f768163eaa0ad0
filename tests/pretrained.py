"""The real pretrained model that tests use: `make real-model` makes it of what a package ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.models.packaged import packaged_gguf
from etude.models.source import packaged_folder

needs_real_model = pytest.mark.skipif(
    not (packaged_folder().is_dir() and packaged_gguf().is_file()),
    reason="the real model is not there, and the package index cannot be reached: make real-model",
)


def real_model() -> Path:
    """Its folder: SmolLM2-135M-Instruct, 135 million parameters in bfloat16."""
    return packaged_folder()


def real_gguf() -> Path:
    """The file that the folder was made of."""
    return packaged_gguf()
