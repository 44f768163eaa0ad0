"""The real pretrained model that tests use, and llama.cpp's converter: `make tests` gets both as packages."""

from __future__ import annotations

import sys
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


def real_converter() -> Path:
    """A folder with llama.cpp's converter and all that it needs."""
    return Path(sys.prefix) / "llama.cpp"


needs_converter = pytest.mark.skipif(
    not real_converter().is_dir(),
    reason="llama.cpp's converter is not there, and the index cannot be reached: make .venv/llama.cpp",
)
