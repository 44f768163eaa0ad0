"""Undoing what another package did to transformers' attention masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any


def undo_mask_patch() -> None:
    """Give transformers back its own function where openpipe-art has put one for earlier releases.

    `import art` replaces it for the whole process, in whatever imports it: the NeMo Agent Toolkit's ART
    plug-in does. With the transformers of today no model runs then.
    """
    patches = sys.modules.get("art.transformers.patches")
    original = getattr(patches, "_preprocess_mask_arguments", None)
    patched = getattr(patches, "_patched_preprocess_mask_arguments", None)
    if original is None or patched is None:
        return
    from transformers import masking_utils

    if masking_utils._preprocess_mask_arguments is patched and not _take_the_same(original, patched):
        masking_utils._preprocess_mask_arguments = original


def _take_the_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    required = [
        [name for name, kind in signature(fn).parameters.items() if kind.default is kind.empty]
        for fn in (one, other)
    ]
    return len(required[0]) == len(required[1])
